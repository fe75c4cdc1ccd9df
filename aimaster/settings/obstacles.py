"""What would stop a well-formed job here: paths and devices that are absent, and what this runtime does not do.

A dry run shows these as warnings, since it may be read on another machine; a run refuses on any of them.
"""

import importlib.metadata
import re
from collections.abc import Iterator

from aimaster.settings.case import Case, look
from aimaster.settings.datafiles import data_files, inner_folder, split_of
from aimaster.settings.effects import GRPO, REFUSED
from aimaster.settings.errors import Problem
from aimaster.settings.job import JobSettings
from aimaster.settings.modelfolder import model_trouble
from aimaster.settings.rows import rows_trouble
from aimaster.settings.spelling import as_path
from aimaster.settings.table import Table
from aimaster.settings.toml_text import toml_value
from aimaster.settings.train_policy import GrpoSettings

TASK = re.compile(r"(sort|add|copy)[1-9][0-9]?|one_?step")
REWARDS = ("exact", "gsm8k", "gsm8k_lenient", "format", "single_choice", "math_verify", "direct_math", "boxed_math")
"""Reward functions that the runtime has; further ones are `module:function` or entry points of REWARD_GROUP."""
MOST_NODES = 256
"""Each agent takes some 50 MiB."""
CHECKPOINTS = ("manifest.json", "policy/*/manifest.json", "storage/policy/*/manifest.json", "resolved.json")
"""Of a checkpoint, a storage, a run folder, and a run folder with its storage elsewhere."""
REWARD_GROUP = "aimaster.rewards"


def find_obstacles(case: Case) -> tuple[Problem, ...]:
    """All of them, in the order of the file."""
    found = [
        *_algorithm(case.job),
        *_batch(case.job),
        *_resume(case.job),
        *_dataset(case.job),
        *_model(case.job),
        *_nodes(case.job),
        *_devices(case),
    ]
    return tuple(Problem(key=key, where=case.origins.get(key, ""), text=text) for key, text in found)


def _algorithm(job: JobSettings) -> Iterator[tuple[str, str]]:
    grpo = job.train.train_policy
    for key, able in REFUSED.items():
        if key.startswith(f"{GRPO}.") and not isinstance(grpo, GrpoSettings):
            continue
        value = look(job, key)
        if value not in able:
            shown = "" if isinstance(value, Table) else f"{toml_value(value)} "
            instead = "leave it out" if able[0] is None else f"set {toml_value(able[0])} or leave it out"
            yield key, f"{shown}is understood, but not done by this runtime; {instead}"
    if job.aimaster.engine == "vllm":
        yield "aimaster.engine", "vllm is understood, but this runtime has no such engine; choose hf"
    if not isinstance(grpo, GrpoSettings):
        yield f"{GRPO}.type", "is understood, but this runtime trains by GRPO only"
    elif unknown := sorted(name for name in grpo.reward_function if ":" not in name and not _is_reward(name)):
        text = f"{', '.join(unknown)} is not known; built in are {', '.join(REWARDS)}, your own is module:function"
        yield f"{GRPO}.reward_function", text
    for key, value in (
        ("optm_lr", job.train.optm_lr),
        ("optm_name", job.train.optm_name),
        ("optm_impl", job.train.optm_impl),
    ):
        if isinstance(value, dict) or (isinstance(value, tuple) and len(set(value)) > 1):
            yield f"train.{key}", "several are understood, but this runtime has one optimiser; give one value"


def _is_reward(name: str) -> bool:
    return name in REWARDS or bool(importlib.metadata.entry_points(group=REWARD_GROUP, name=name))


def _batch(job: JobSettings) -> Iterator[tuple[str, str]]:
    dealt = job.train.train_batch_per_replica * job.policy.parallelism.n_init_replicas
    if dealt % job.rollout.n_generation:
        answers = f"{job.train.train_batch_per_replica} × policy.parallelism.n_init_replicas = {dealt} answers a step"
        groups = f"of rollout.n_generation = {job.rollout.n_generation}"
        yield "train.train_batch_per_replica", f"{answers} is no whole number of groups {groups}"


def _resume(job: JobSettings) -> Iterator[tuple[str, str]]:
    resume = job.train.resume
    if not isinstance(resume, str):
        return
    path = as_path(resume)
    if path is None:
        yield "train.resume", f'"{resume}" is neither true, false nor an existing path'
    elif path.is_dir() and not any(True for pattern in CHECKPOINTS for _ in path.glob(pattern)):
        yield (
            "train.resume",
            f"{resume} holds no checkpoint: name a checkpoint, the storage it lies in, or a run folder",
        )


def _dataset(job: JobSettings) -> Iterator[tuple[str, str]]:
    policy, name = job.train.train_policy, f"{GRPO}.dataset.name"
    if job.aimaster.task and not TASK.fullmatch(job.aimaster.task):
        yield "aimaster.task", f"{job.aimaster.task} is no built-in task; there are sort6, add2, copy6 and one_step"
    if job.aimaster.task or not isinstance(policy, GrpoSettings):
        return
    given = policy.dataset.local_dir or policy.dataset.name
    if not given:
        yield name, "is empty: name a folder or file of JSONL or Parquet rows, or a built-in aimaster.task"
        return
    path = as_path(given)
    if path is None:
        yield name, f"{given} is not here: name a folder or file of JSONL or Parquet rows"
        return
    files = [path]
    if path.is_dir():
        subset, splits = policy.dataset.subset or "", policy.dataset.split
        found, inner = data_files(path, subset), inner_folder(path, subset)
        files = [file for file in found if not splits or split_of(file, inner) in splits]
        if not found:
            yield name, f"{given} holds neither JSONL nor Parquet files"
        elif not files:
            have = ", ".join(sorted({split_of(file, inner) for file in found}))
            yield f"{GRPO}.dataset.split", f"{inner} holds no {' or '.join(splits)}; it holds {have}"
    columns = {
        f"{GRPO}.prompt_column_name": policy.prompt_column_name,
        f"{GRPO}.response_column_name": policy.response_column_name,
    }
    yield from rows_trouble(files, f"{GRPO}.dataset.local_dir" if policy.dataset.local_dir else name, columns)


def _model(job: JobSettings) -> Iterator[tuple[str, str]]:
    key, given = "policy.model_name_or_path", job.policy.model_name_or_path
    if job.aimaster.model is not None:
        return
    path = as_path(given)
    if path is None:
        made = "; `make model` makes it" if "smollm2" in given.lower() else ""
        yield key, f"{given} is not here{made or ': name a folder with config.json, a tokenizer and weights'}"
    elif (trouble := model_trouble(path)) is not None:
        yield key, trouble


def _nodes(job: JobSettings) -> Iterator[tuple[str, str]]:
    if job.aimaster.nodes > MOST_NODES:
        yield (
            "aimaster.nodes",
            f"{job.aimaster.nodes} nodes are an agent process each; at most {MOST_NODES} are started on one machine",
        )


def _devices(case: Case) -> Iterator[tuple[str, str]]:
    job, total, parts = case.job, 0, []
    for role, mesh in (("policy", job.policy.parallelism), ("rollout", job.rollout.parallelism)):
        ranks = mesh.tp_size * mesh.cp_size * mesh.pp_size * mesh.dp_shard_size * mesh.dp_replicate_size
        total += mesh.n_init_replicas * ranks
        parts.append(f"{role} {mesh.n_init_replicas} × {ranks}")
        if case.on_cpu and ranks > 1:
            yield (
                f"{role}.parallelism",
                f"a member of {ranks} ranks needs as many GPUs, and tensors live on the CPU here",
            )
    if not case.on_cpu and total > case.gpus:
        yield "aimaster.device", f"{total} GPUs are needed ({', '.join(parts)}), {case.gpus} are here"
