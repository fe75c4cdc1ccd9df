"""The configuration of a job: Cosmos-RL's TOML plus one table of ours, strict but kind.

    resolved = load("job.toml", ["--train.epoch", "2"], os.environ)     # raises SettingsError with all problems
    resolved.job.rollout.n_generation
    from_json(to_json(resolved)) == resolved.job                        # what members read

Flow: sources (file, environment, flags) → check (types, names) → rules (what follows) → obstacles → render.
"""

from aimaster.settings.errors import Notice, Problem, SettingsError
from aimaster.settings.job import JobSettings
from aimaster.settings.render import from_json, render_resolved, to_json
from aimaster.settings.resolve import Resolved, load
from aimaster.settings.train_policy import GrpoSettings

__all__ = [
    "GrpoSettings",
    "JobSettings",
    "Notice",
    "Problem",
    "Resolved",
    "SettingsError",
    "from_json",
    "load",
    "render_resolved",
    "to_json",
]
