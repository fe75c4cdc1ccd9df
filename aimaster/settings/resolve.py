"""Defaults, file, environment, flags: in this order each overrides the one before; then the rules say what follows.

    resolved = load("job.toml", ["--train.epoch", "2"], os.environ)
    resolved.job.train.epoch

All problems are raised in one `SettingsError`. Nothing heavy is imported and nothing is started.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aimaster.settings.case import Case, Change, Note, Outcome, Warn, Wrong, changed, look
from aimaster.settings.check import check, known_keys
from aimaster.settings.errors import Notice, Problem, SettingsError
from aimaster.settings.job import JobSettings
from aimaster.settings.obstacles import find_obstacles
from aimaster.settings.rules import RULES
from aimaster.settings.sources import read_environment, read_file, read_flags


class Resolved(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that can be used, and all that is to be said about it."""

    job: JobSettings
    """The values."""
    source: str
    """The file they came from, empty without one."""
    origins: dict[str, str]
    """Who gave a key, or what it follows from; a key that is not here has its default."""
    legacy: dict[str, Any]
    """Legacy keys that were accepted, as given."""
    warnings: tuple[Notice, ...]
    """Accepted, but look again."""
    notes: tuple[Notice, ...]
    """What some values do, or do not do, here."""
    obstacles: tuple[Problem, ...]
    """What would stop the job on this machine; a dry run warns, a run refuses."""


def load(
    path: str | Path | None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    *,
    gpus: int | None = None,
) -> Resolved:
    """Read, check and complete a configuration. `gpus` stands for the devices found here."""
    environ = os.environ if environ is None else environ
    problems: list[Problem] = []
    tree = read_file(Path(path), problems) if path is not None else {}
    if problems:  # without its file, all else would be judged wrongly
        raise SettingsError(problems)
    read_environment(tree, environ, {key.lower(): key for key in known_keys()}, problems)
    read_flags(tree, overrides, problems)
    job, checked = check(tree)
    problems += checked.problems
    if problems:
        raise SettingsError(problems)

    gpus = count_gpus(environ) if gpus is None else gpus
    case = Case(job=job, sources=frozenset(checked.origins), origins=checked.origins, gpus=gpus)
    case, outcomes = follow(case)
    wrong = [outcome for outcome in outcomes if isinstance(outcome, Wrong)]
    if wrong:
        raise SettingsError([Problem(key=o.key, where=case.origins.get(o.key, ""), text=o.text) for o in wrong])
    return Resolved(
        job=case.job,
        source=str(path or ""),
        origins=dict(case.origins),
        legacy=checked.legacy,
        warnings=(*checked.warnings, *_notices(case, outcomes, Warn)),
        notes=(*checked.notes, *_notices(case, outcomes, Note)),
        obstacles=find_obstacles(case),
    )


def follow(case: Case) -> tuple[Case, list[Outcome]]:
    """Apply the rules in order; each sees the changes of those before it."""
    outcomes: list[Outcome] = []
    for rule in RULES:
        for outcome in list(rule(case)):
            outcomes.append(outcome)
            if isinstance(outcome, Change):
                origins = {**case.origins, outcome.key: _follows(case, outcome)}
                job = changed(case.job, outcome.key, outcome.value)
                case = msgspec.structs.replace(case, job=job, origins=origins)
    return case, outcomes


def _follows(case: Case, change: Change) -> str:
    before = case.origins.get(change.key)
    return f"{change.text} ({before} gave {look(case.job, change.key)})" if before else change.text


def _notices(case: Case, outcomes: Sequence[Outcome], kind: type[Warn] | type[Note]) -> tuple[Notice, ...]:
    return tuple(
        Notice(key=o.key, where=case.origins.get(o.key, ""), text=o.text) for o in outcomes if isinstance(o, kind)
    )


def count_gpus(environ: Mapping[str, str]) -> int:
    """CUDA devices by their device files, as far as CUDA_VISIBLE_DEVICES lets them be seen."""
    here = len(glob.glob("/dev/nvidia[0-9]*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return here
    named = [part for part in visible.split(",") if part.strip() not in {"", "-1"}]
    return min(here, len(named))
