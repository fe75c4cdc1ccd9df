"""Who this process is: read once from the AIMASTER_* variables that its agent set."""

import os
from pathlib import Path

import msgspec

from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.places import (
    ENV_INCARNATION,
    ENV_MEMBER,
    ENV_NODE,
    ENV_NODE_MEMORY,
    ENV_RUN_DIR,
    RunPlaces,
)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A member as it names itself to the controller."""

    member: MemberId
    incarnation: Incarnation
    node: str


class Surroundings(msgspec.Struct, frozen=True, kw_only=True):
    """A member and the folders it may use."""

    identity: Identity
    run: Path
    memory: Path
    """The node's memory folder."""

    @property
    def places(self) -> RunPlaces:
        return RunPlaces(self.run)


def read_environment() -> Surroundings:
    """Return what the environment says; a variable that is missing is a KeyError that names it."""
    return Surroundings(
        identity=Identity(
            member=MemberId(os.environ[ENV_MEMBER]),
            incarnation=Incarnation(int(os.environ.get(ENV_INCARNATION, "0"))),
            node=os.environ[ENV_NODE],
        ),
        run=Path(os.environ[ENV_RUN_DIR]),
        memory=Path(os.environ[ENV_NODE_MEMORY]),
    )
