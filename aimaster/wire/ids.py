"""A distinct type for each identifier, so that the type checker sees a node passed where a member is meant."""

from typing import NewType

RunId = NewType("RunId", str)
"""Eight hex digits, made once when a run folder is created; part of the names of the node's memory folder."""

NodeId = NewType("NodeId", str)
"""Name of a node within the run, for example `node-0`."""

MemberId = NewType("MemberId", str)
"""One replica of a role: `policy-0`, `rollout-3`, `controller-0`; for wrapped commands `rank-0`, or `command-0` without ranks."""

Incarnation = NewType("Incarnation", int)
"""How many times a member has been started before in this run; 0 for the first start. Fences a zombie of an earlier start."""

Term = NewType("Term", int)
"""Rises with every start of a master; an order of an older term is refused."""

IncidentId = NewType("IncidentId", str)
"""`i-1`, `i-2`, ... in order of detection within a run."""

OrderId = NewType("OrderId", str)
"""`TERM.NUMBER.START`, the start of the master that gave it in milliseconds: a master whose journal was lost repeats terms, never names.
An agent carries out an order once, however often it arrives."""
