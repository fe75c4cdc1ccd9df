"""Which lineage a save belongs to, pure. A lineage rises by one when a state goes back behind a step that was already saved, so that the
dead branch is never taken for the newest: its steps stand above the living ones, but below a rewind that every later header carries.
"""

from __future__ import annotations

import msgspec

from easyckpt.layout import Rewind, Version


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Where a state comes from."""

    lineage: int = 0
    """Of the last save or restore."""
    step: int = -1
    """Of the last save or restore; -1 before the first."""
    rewinds: tuple[Rewind, ...] = ()
    """Every going back so far."""

    @property
    def version(self) -> Version:
        return (self.lineage, self.step)


class Sealed(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot that is whole in this rank's memory."""

    lineage: int
    """Of the version."""
    step: int
    """Of the version."""
    state_digest: str
    """Over all tensors."""
    chain: str
    """Hash chain of the applied (step, batch digest) pairs."""

    @property
    def version(self) -> Version:
        return (self.lineage, self.step)


def begin(history: History, newest_known: Version | None) -> History:
    """Before the first save: what lies there and is newer than the state was left behind, by a choice or by starting anew."""
    if newest_known is None or newest_known <= history.version:
        return history
    return _gone_back(history, newest_known[0] + 1, history.step)


def advance(history: History, step: int, given: int | None = None) -> History:
    """For each save: `given` is the caller's own count of lineages, None leaves the counting to us."""
    if given is not None and given > history.lineage:
        history = _gone_back(history, given, min(history.step, step - 1))
    elif given is not None:
        history = msgspec.structs.replace(history, lineage=given)
    elif step <= history.step:
        history = _gone_back(history, history.lineage + 1, step - 1)
    return msgspec.structs.replace(history, step=step)


def _gone_back(history: History, lineage: int, step: int) -> History:
    rewind = Rewind(lineage=lineage, step=max(0, step))
    return History(lineage=lineage, step=step, rewinds=(*history.rewinds, rewind))
