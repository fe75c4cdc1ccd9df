"""What a rule looks at, what it can say, and how a value is looked up or replaced by its dotted path."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from aimaster.settings.job import JobSettings
from aimaster.settings.train_policy import GrpoSettings


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What a rule looks at."""

    job: JobSettings
    """The configuration so far."""
    sources: frozenset[str]
    """Keys that somebody gave."""
    origins: Mapping[str, str]
    """Who gave them, and what each changed value follows from."""
    gpus: int
    """CUDA devices of this machine."""

    @property
    def grpo(self) -> GrpoSettings | None:
        """The GRPO table, unless the job is a supervised one."""
        policy = self.job.train.train_policy
        return policy if isinstance(policy, GrpoSettings) else None

    @property
    def on_cpu(self) -> bool:
        """Whether tensors live in main memory."""
        device = self.job.aimaster.device
        return device == "cpu" or (device == "auto" and self.gpus == 0)

    def given(self, key: str) -> bool:
        """Whether somebody set this key."""
        return key in self.sources

    def given_later(self, key: str, other: str) -> bool:
        """Whether the first was set by a later source: flags come after the environment, and that after the file."""
        return _place_of(self.origins.get(key, "")) > _place_of(self.origins.get(other, ""))


def _place_of(origin: str) -> int:
    return 2 if origin.startswith("flag ") else 1 if origin.startswith("environment ") else 0


class Wrong(msgspec.Struct, frozen=True):
    """A contradiction."""

    key: str
    text: str


class Change(msgspec.Struct, frozen=True):
    """A value that follows from others."""

    key: str
    value: Any
    text: str
    """What it follows from; shown as the value's origin."""


class Warn(msgspec.Struct, frozen=True):
    """A value that stands, and is probably not what was meant."""

    key: str
    text: str


class Note(msgspec.Struct, frozen=True):
    """A value that stands, and what it does here."""

    key: str
    text: str


Outcome = Wrong | Change | Warn | Note
Rule = Callable[[Case], Iterator[Outcome]]


def look(job: JobSettings, key: str) -> Any:
    """The value at a dotted path."""
    value: Any = job
    for name in key.split("."):
        value = getattr(value, name)
    return value


def default(job: JobSettings, key: str) -> Any:
    """The default of a key, in the table that the job has there."""
    path, _, name = key.rpartition(".")
    (field,) = (field for field in msgspec.structs.fields(look(job, path) if path else job) if field.name == name)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def changed(table: Any, key: str, value: Any) -> Any:
    """A copy of a table with one value replaced at a dotted path."""
    name, _, rest = key.partition(".")
    return msgspec.structs.replace(table, **{name: changed(getattr(table, name), rest, value) if rest else value})
