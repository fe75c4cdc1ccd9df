"""What values say together: contradictions are problems, and what follows from other keys is changed and said.

Each rule is a generator over a `Case`; it yields a `Wrong`, a `Change`, a `Warn` or a `Note`. Cosmos-RL makes most of
these changes in silence. Ours are marked in the resolved configuration with what they follow from.
"""

import re
from collections.abc import Iterator

from aimaster.settings.case import Case, Change, Note, Outcome, Rule, Warn, Wrong, default, look
from aimaster.settings.effects import GPU_ONLY, GRPO, is_quiet
from aimaster.settings.job import JobSettings
from aimaster.settings.train_policy import SftSettings

TASK_OF_DIGITS = re.compile(r"(sort|add|copy)([1-9][0-9]?)")


def compile_for_async_tp(case: Case) -> Iterator[Outcome]:
    if case.job.train.async_tp_enabled and not case.job.train.compile:
        yield Wrong("train.async_tp_enabled", "needs train.compile = true")


def lora(case: Case) -> Iterator[Outcome]:
    policy, train = case.job.policy, case.job.train
    if policy.lora is None or case.grpo is None:
        return
    if train.compile and not case.on_cpu:
        yield Wrong("policy.lora", "GRPO with LoRA needs train.compile = false")
    if policy.parallelism.tp_size > 1:
        yield Wrong("policy.lora", "GRPO with LoRA needs policy.parallelism.tp_size = 1")


def patterns(case: Case) -> Iterator[Outcome]:
    if case.job.policy.freeze_pattern is not None and case.job.policy.trainable_pattern is not None:
        yield Wrong("policy.trainable_pattern", "and policy.freeze_pattern exclude each other; keep one")


def batches(case: Case) -> Iterator[Outcome]:
    train, mesh = case.job.train, case.job.policy.parallelism
    batch, micro = train.train_batch_per_replica, train.train_policy.mini_batch
    unit = mesh.dp_shard_size * micro
    if batch % unit:
        shown = f"policy.parallelism.dp_shard_size × {GRPO}.mini_batch = {mesh.dp_shard_size} × {micro}"
        yield Wrong("train.train_batch_per_replica", f"{batch} must be a multiple of {shown}")
    if mesh.pp_size > 1:
        if micro % mesh.pp_micro_batch_size:
            yield Wrong(
                f"{GRPO}.mini_batch", f"{micro} must be a multiple of pp_micro_batch_size = {mesh.pp_micro_batch_size}"
            )
        if batch % mesh.pp_micro_batch_size:
            shown = f"policy.parallelism.pp_micro_batch_size = {mesh.pp_micro_batch_size}"
            yield Wrong("train.train_batch_per_replica", f"{batch} must be a multiple of {shown}")
        if train.fsdp_offload:
            yield Wrong("train.fsdp_offload", "cannot be used with policy.parallelism.pp_size above 1")


def checkpoints(case: Case) -> Iterator[Outcome]:
    ckpt, kept = case.job.train.ckpt, case.job.aimaster.snapshots
    if ckpt.max_keep == 0:
        yield Wrong("train.ckpt.max_keep", "0 would keep no checkpoint; give at least 1, or -1 for all")
    if ckpt.upload_s3 and not ckpt.s3_bucket:
        yield Wrong("train.ckpt.upload_s3", "needs train.ckpt.s3_bucket")
    if kept.flush_every == 0:
        yield Change("aimaster.snapshots.flush_every", ckpt.save_freq, "follows train.ckpt.save_freq")
    if kept.keep == 0:
        yield Change("aimaster.snapshots.keep", ckpt.max_keep, "follows train.ckpt.max_keep")
    if case.given("train.ckpt.enable_checkpoint") and not ckpt.enable_checkpoint:
        yield Note(
            "train.ckpt.enable_checkpoint",
            "false turns off exports only; state is always kept, for that is what heals the job",
        )


def seeds(case: Case) -> Iterator[Outcome]:
    train, own = case.job.train, case.job.aimaster
    seed = train.seed
    if train.deterministic and seed is None:
        seed = 42
        yield Change("train.seed", seed, "follows train.deterministic")
    if seed is not None and not case.given("aimaster.seed") and own.seed != seed:
        yield Change("aimaster.seed", seed, "follows train.seed")


def dtypes(case: Case) -> Iterator[Outcome]:
    train = case.job.train
    if train.transfer_dtype is None:
        yield Change("train.transfer_dtype", train.master_dtype, "follows train.master_dtype")
    if case.on_cpu:
        for key, dtype in (("train.param_dtype", train.param_dtype), ("train.master_dtype", train.master_dtype)):
            if dtype != "float32":
                yield Change(key, "float32", "float32 is the only dtype of useful speed on a CPU")


def group(case: Case) -> Iterator[Outcome]:
    """A group of one has no other answer to be better than; a teacher's log-probs would do without."""
    if case.grpo is not None and case.job.rollout.n_generation < 2 and not case.job.distillation.enable:
        text = "1 leaves nothing to compare: GRPO weighs the answers to one prompt against each other; give at least 2"
        yield Wrong("rollout.n_generation", text)


def bounds(case: Case) -> Iterator[Outcome]:
    """A lower bound above its upper one leaves nothing between."""
    grpo = case.grpo
    if grpo is None:
        return
    remote = f"{GRPO}.remote_reward.reward_clip_"
    pairs = (
        (f"{GRPO}.advantage_low", grpo.advantage_low, f"{GRPO}.advantage_high", grpo.advantage_high),
        (f"{remote}min", grpo.remote_reward.reward_clip_min, f"{remote}max", grpo.remote_reward.reward_clip_max),
    )
    for low_key, low, high_key, high in pairs:
        if low >= high:
            yield Wrong(low_key, f"{low} must be below {high_key} = {high}")


def rewards(case: Case) -> Iterator[Outcome]:
    grpo, validation = case.grpo, case.job.validation
    if grpo is None:
        return
    if not grpo.reward_function:
        yield Wrong(f"{GRPO}.reward_function", "is empty; name at least one reward")
    differs = validation.use_remote_reward is not None and validation.use_remote_reward != grpo.use_remote_reward
    if validation.enable and differs:
        yield Wrong("validation.use_remote_reward", f"must say the same as {GRPO}.use_remote_reward")


def staleness(case: Case) -> Iterator[Outcome]:
    grpo, interval = case.grpo, case.job.train.sync_weight_interval
    if grpo is None:
        return
    key = f"{GRPO}.allowed_outdated_steps"
    if grpo.on_policy:
        if interval != 1:
            yield Wrong(f"{GRPO}.on_policy", "needs train.sync_weight_interval = 1")
        elif grpo.allowed_outdated_steps:
            yield Change(key, 0, f"follows {GRPO}.on_policy")
    elif grpo.allowed_outdated_steps < interval - 1:
        yield Change(key, interval - 1, "follows train.sync_weight_interval, which is one more")


def throttle(case: Case) -> Iterator[Outcome]:
    grpo = case.grpo
    if grpo is None:
        return
    least = grpo.allowed_outdated_steps + 1
    if grpo.max_inflight_steps is not None and grpo.max_inflight_steps < least:
        yield Change(f"{GRPO}.max_inflight_steps", least, f"is at least {GRPO}.allowed_outdated_steps + 1")
    if grpo.variant == "dapo" and grpo.outdated_rollout_fetch_batch_size == 0:
        yield Change(f"{GRPO}.outdated_rollout_fetch_batch_size", 128, f"follows {GRPO}.variant = dapo")


def dapo(case: Case) -> Iterator[Outcome]:
    grpo = case.grpo
    if grpo is None or grpo.variant != "dapo":
        return
    clip = "no clip-higher" if grpo.epsilon_high == grpo.epsilon_low else "clip-higher"
    overlong = "a" if grpo.overlong_reward.enable_overlong_penalty else "no"
    yield Note(
        f"{GRPO}.variant", f"dapo: groups whose rewards do not differ are dropped; {clip}, {overlong} length penalty"
    )


def correction(case: Case) -> Iterator[Outcome]:
    """Importance correction is on unless the file says otherwise: without it the ratio is 1 and staleness uncorrected."""
    grpo = case.grpo
    if grpo is None:
        return
    own, decoupled = f"{GRPO}.use_rollout_logprobs_for_loss", f"{GRPO}.use_decoupled_loss"
    if grpo.use_rollout_logprobs_for_loss and grpo.use_decoupled_loss:
        yield Wrong(own, f"and {decoupled} exclude each other; keep one")
        return
    by_default = not (grpo.use_rollout_logprobs_for_loss or grpo.use_decoupled_loss or case.given(own))
    if by_default:
        yield Change(own, True, "on by default here: stale answers are corrected by the engine's own log-probs")
    if grpo.use_rollout_logprobs_for_loss or grpo.use_decoupled_loss or by_default:
        source = decoupled if grpo.use_decoupled_loss else own
        if not grpo.collect_rollout_logprobs:
            yield Change(f"{GRPO}.collect_rollout_logprobs", True, f"follows {source}")
        if not grpo.rollout_as_token_ids:
            yield Change(
                f"{GRPO}.rollout_as_token_ids", True, f"follows {source}: text may not come back as the same tokens"
            )
    elif grpo.aipo_rho is not None:
        yield Warn(f"{GRPO}.aipo_rho", f"changes nothing without {own} or {decoupled}")


def uncentralized(case: Case) -> Iterator[Outcome]:
    if case.grpo is not None and case.grpo.uncentralized_training and case.grpo.variant != "grpo":
        yield Wrong(f"{GRPO}.uncentralized_training", f'needs {GRPO}.variant = "grpo"')


def distillation(case: Case) -> Iterator[Outcome]:
    grpo = case.grpo
    if grpo is None or not case.job.distillation.enable:
        return
    if not grpo.rollout_as_token_ids:
        yield Change(f"{GRPO}.rollout_as_token_ids", True, "follows distillation.enable")
    if not grpo.bypass_reward:
        yield Change(f"{GRPO}.bypass_reward", True, "follows distillation.enable")


def balancing(case: Case) -> Iterator[Outcome]:
    policy = case.job.train.train_policy
    if isinstance(policy, SftSettings) and policy.enable_dp_load_balancing and case.job.train.max_num_steps is None:
        yield Wrong(f"{GRPO}.enable_dp_load_balancing", "needs train.max_num_steps")


def one_temperature(case: Case) -> Iterator[Outcome]:
    """Cosmos-RL samples at one temperature and divides the trainer's logits by another; here one serves both."""
    grpo = case.grpo
    if grpo is None:
        return
    own, engine = f"{GRPO}.temperature", "rollout.sampling_config.temperature"
    sampled = case.job.rollout.sampling_config.temperature
    if grpo.temperature == sampled:
        return
    if case.given(own) and case.given(engine):
        yield Warn(
            engine,
            f"{sampled} differs from {own} = {grpo.temperature}: the trainer's log-probs are not those of the sampler",
        )
    elif case.given(own):
        yield Change(engine, grpo.temperature, f"follows {own}")
    elif sampled > 0:
        yield Change(own, sampled, f"follows {engine}")
    else:
        yield Wrong(engine, "must be above 0 for training: a greedy answer has no log-prob to correct by")


def answer_room(case: Case) -> Iterator[Outcome]:
    whole, answer = case.job.policy.model_max_length, case.job.rollout.max_response_length
    prompt = longest_prompt(case.job)
    if whole <= prompt:
        prompts = f"a prompt of {case.job.aimaster.task}" if case.job.aimaster.task else "the shortest prompt"
        text = f"{whole} leaves no room for an answer: {prompts} takes {prompt} of them; give at least {prompt + 1}"
        yield Wrong("policy.model_max_length", text)
        return
    if case.given("policy.model_max_length") and answer >= whole:
        text = f"room for an answer is {whole} − prompt tokens, below rollout.max_response_length = {answer}"
        yield Note("policy.model_max_length", text)


def longest_prompt(job: JobSettings) -> int:
    """Tokens of a prompt, as far as they are known before it is read: a fresh model takes one for each character and one to begin."""
    task = TASK_OF_DIGITS.fullmatch(job.aimaster.task)
    if task is None or job.aimaster.model is None:
        return 1
    digits = int(task[2])
    return 1 + (2 * digits + 2 if task[1] == "add" else digits + 1)


def one_rank_on_cpu(case: Case) -> Iterator[Outcome]:
    """Cosmos-RL's default is two tensor-parallel ranks; on a CPU a member is one process unless the file asks for more."""
    if not case.on_cpu:
        return
    for table in ("policy.parallelism", "rollout.parallelism", "distillation.parallelism"):
        if not case.given(f"{table}.tp_size") and look(case.job, f"{table}.tp_size") != 1:
            yield Change(f"{table}.tp_size", 1, "one rank a member on a CPU")


def fresh_model(case: Case) -> Iterator[Outcome]:
    model, engine = case.job.aimaster.model, case.job.aimaster.engine
    if model is None:
        if engine == "tiny":
            yield Wrong("aimaster.engine", "tiny decodes a fresh model only: give [aimaster.model], or choose hf")
        return
    if not case.given("aimaster.engine"):
        yield Change("aimaster.engine", "tiny", "follows [aimaster.model]")
    elif engine != "tiny":
        yield Wrong("aimaster.engine", f"{engine} loads a model folder; with [aimaster.model] choose tiny")
    for whole, part in (("hidden_size", "num_attention_heads"), ("num_attention_heads", "num_key_value_heads")):
        if getattr(model, whole) % getattr(model, part):
            yield Wrong(f"aimaster.model.{whole}", f"must be a multiple of {part} = {getattr(model, part)}")
    longest, key = model.max_position_embeddings, "policy.model_max_length"
    if not case.given(key):
        yield Change(key, longest, "follows aimaster.model.max_position_embeddings")
    elif case.job.policy.model_max_length > longest:
        yield Wrong(key, f"is more than aimaster.model.max_position_embeddings = {longest}")


def rows(case: Case) -> Iterator[Outcome]:
    """Of a built-in task and a data set, the one that a later source named; side by side they contradict each other."""
    task, name = "aimaster.task", f"{GRPO}.dataset.name"
    if case.grpo is None or not (case.job.aimaster.task and case.grpo.dataset.name):
        return
    if case.given_later(name, task):
        yield Change(task, "", f"follows {name}")
        yield Note(name, f"takes the place of {task} = {case.job.aimaster.task}")
    elif case.given_later(task, name):
        yield Change(name, "", f"follows {task}")
        yield Note(task, f"takes the place of {name} = {case.grpo.dataset.name}")
    else:
        yield Wrong(task, f'and {name} exclude each other: keep one, or give --{task} "" to train on the data set')


def template(case: Case) -> Iterator[Outcome]:
    text = case.job.aimaster.prompt_template
    if text and "{prompt}" not in text:
        yield Wrong("aimaster.prompt_template", "must hold {prompt}, which stands for each prompt of the data set")
    elif text and case.job.aimaster.task:
        yield Note("aimaster.prompt_template", "no effect on a built-in task, which words its prompts itself")


def placement(case: Case) -> Iterator[Outcome]:
    job, own = case.job, case.job.aimaster
    nodes = {f"node-{index}" for index in range(own.nodes)}
    counts = {
        "controller": 1,
        "policy": job.policy.parallelism.n_init_replicas,
        "rollout": job.rollout.parallelism.n_init_replicas,
    }
    members = {f"{role}-{index}" for role, count in counts.items() for index in range(count)}
    for key, named in (("placement", own.placement), ("env", own.env)):
        for node in sorted(set(named) - nodes - ({"all"} if key == "env" else set())):
            yield Wrong(
                f"aimaster.{key}", f"{node} is no node; with aimaster.nodes = {own.nodes} there are {_listed(nodes)}"
            )
    placed: set[str] = set()
    for node, names in own.placement.items():
        for name in names:
            if name not in members:
                yield Wrong(
                    "aimaster.placement", f"{name} (on {node}) is no member of this job; there are {_listed(members)}"
                )
            elif name in placed:
                yield Wrong("aimaster.placement", f"{name} is placed twice")
            placed.add(name)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names))


def unused_port(case: Case) -> Iterator[Outcome]:
    if case.job.redis:
        yield Note("redis", f"port {case.job.redis} is not used: no redis is started; ports are chosen free")


def no_effect_on_cpu(case: Case) -> Iterator[Outcome]:
    if case.on_cpu:
        for key in GPU_ONLY:
            if case.given(key):
                yield Note(key, "no effect on a CPU")


def without_effect(case: Case) -> Iterator[Outcome]:
    """One line for all keys that are kept and do nothing here; a default without effect is no news."""
    silent = [key for key in sorted(case.sources) if not is_quiet(key) and not (case.on_cpu and key in GPU_ONLY)]
    idle = [key for key in silent if look(case.job, key) != default(case.job, key)]
    if idle:
        yield Note("", f"kept, without effect in this runtime: {', '.join(idle)}")


# Changes first, in an order in which each sees what it follows from.
RULES: tuple[Rule, ...] = (
    rows, one_rank_on_cpu, fresh_model, dtypes, seeds, correction, distillation, staleness, throttle, one_temperature, checkpoints,
    compile_for_async_tp, lora, patterns, batches, group, bounds, rewards, uncentralized, balancing, template, placement,
    dapo, answer_room, unused_port, no_effect_on_cpu, without_effect,
)  # fmt: skip
