"""Names of files and environment variables of a run. Pure: makes paths, touches nothing.

RUN (stands for storage that all nodes see)
    lock  run.json  plan.json  resolved.json  token  master.json  controller.json  summary.json
    journal/  ledger/  storage/  logs/{master,front}.log
    nodes/NODE/agent.log  outbox/  members/MEMBER/{spec.json,pid.json,exit.json,output.log,stacks.txt,gradients/}
/dev/shm/aimaster-RUNID-NODE (the node's memory, mode 0700)
    agent.sock  segments/  progress/MEMBER
"""

import os
from pathlib import Path

from aimaster.wire.ids import MemberId, NodeId, RunId

MEMORY_ROOT = Path("/dev/shm")  # noqa: S108 - node folders in it are made with mode 0700, and ours by name

ENV_RUN_DIR = "AIMASTER_RUN_DIR"
ENV_RUN_ID = "AIMASTER_RUN_ID"
ENV_NODE = "AIMASTER_NODE"
ENV_MEMBER = "AIMASTER_MEMBER"
ENV_ROLE = "AIMASTER_ROLE"
ENV_RANK = "AIMASTER_RANK"
ENV_INCARNATION = "AIMASTER_INCARNATION"
ENV_NODE_MEMORY = "AIMASTER_NODE_MEMORY"
ENV_NODE_DIR = "AIMASTER_NODE_DIR"
ENV_STARTUP_HANG_SECONDS = "AIMASTER_STARTUP_HANG_SECONDS"
ENV_LEASE_FLOOR_SECONDS = "AIMASTER_LEASE_FLOOR_SECONDS"
ENV_CONTROLLER_URL = "AIMASTER_CONTROLLER_URL"
"""Set, it is used in place of RUN/controller.json: a fixed address, or a proxy."""
ENV_MASTER_URL = "AIMASTER_URL"


class RunPlaces:
    """Paths inside one run folder."""

    def __init__(self, run: os.PathLike[str] | str) -> None:
        self.run = Path(run)
        self.lock = self.run / "lock"
        self.info = self.run / "run.json"
        self.plan = self.run / "plan.json"
        self.resolved = self.run / "resolved.json"
        self.token = self.run / "token"
        self.master = self.run / "master.json"
        self.controller = self.run / "controller.json"
        self.summary = self.run / "summary.json"
        self.journal = self.run / "journal"
        self.ledger = self.run / "ledger"
        self.storage = self.run / "storage"
        self.logs = self.run / "logs"

    def node(self, node: NodeId) -> Path:
        """The folder that only this node's agent and members open."""
        return self.run / "nodes" / node

    def member(self, node: NodeId, member: MemberId) -> Path:
        """Shim files, log and stack dumps of a member."""
        return self.node(node) / "members" / member


def node_memory(run_id: RunId, node: NodeId) -> Path:
    """The node's memory folder."""
    return MEMORY_ROOT / f"aimaster-{run_id}-{node}"


def agent_socket(memory: Path) -> Path:
    """Unix socket of the node's agent; short on purpose, a socket path holds 107 bytes."""
    return memory / "agent.sock"


def segments(memory: Path) -> Path:
    """Folder of the snapshot segments."""
    return memory / "segments"


def progress_file(memory: Path, member: MemberId) -> Path:
    """Mapped file into which the training thread beats."""
    return memory / "progress" / member
