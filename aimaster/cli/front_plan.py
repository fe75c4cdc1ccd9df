"""What runs where, decided from the configuration or the command line alone. Pure: makes the plan, starts nothing.

A job of ours: one controller, the policy and rollout members the file asks for, dealt round the nodes role by role, so that
policy-0 and rollout-0 share a node. A wrapped command: one member, or one for each rank with torchrun's variables.
"""

from collections.abc import Mapping, Sequence
from pathlib import PurePath

from aimaster.settings.job import JobSettings
from aimaster.wire.ids import MemberId, NodeId, RunId
from aimaster.wire.topology import JobPlan, MemberSpec

QUIET_THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
"""Spinning OpenMP threads of several processes on shared cores cost 5 to 15 times."""


class PlanError(ValueError):
    """The wish cannot be planned; the message says which part."""


def plan_training(
    settings: JobSettings, *, run_id: RunId, name: str, python: str, cwd: str, front_pid: int, steps: int | None
) -> JobPlan:
    """The plan of a job of ours."""
    own = settings.aimaster
    nodes = tuple(NodeId(f"node-{index}") for index in range(own.nodes))
    counts = {
        "controller": 1,
        "policy": settings.policy.parallelism.n_init_replicas,
        "rollout": settings.rollout.parallelism.n_init_replicas,
    }
    placement = place(counts, nodes, own.placement)
    members = {
        member: MemberSpec(
            member=member,
            role=role,
            rank=index,
            argv=(python, "-m", "rl_runtime.launch", role),
            env=QUIET_THREADS | own.env.get("all", {}),
            cwd=cwd,
            startup_hang_seconds=own.leases.startup_hang_seconds,
            lease_floor_seconds=own.leases.shortest_seconds,
        )
        for role, count in counts.items()
        for index in range(count)
        for member in (MemberId(f"{role}-{index}"),)
    }
    return JobPlan(
        run_id=run_id,
        name=name,
        kind="rl",
        nodes=nodes,
        members=members,
        placement=placement,
        node_env={node: own.env[node] for node in nodes if node in own.env},
        max_restarts=own.budgets.member_restarts,
        restart_window_seconds=own.budgets.window_seconds,
        node_silent_seconds=own.leases.agent_silence_seconds,
        front_pid=front_pid,
        steps=steps,
    )


def place(
    counts: Mapping[str, int], nodes: Sequence[NodeId], wished: Mapping[str, Sequence[str]]
) -> dict[MemberId, NodeId]:
    """Each member's node: as wished by name, the others round the nodes, role by role."""
    members = [MemberId(f"{role}-{index}") for role, count in counts.items() for index in range(count)]
    fixed: dict[MemberId, NodeId] = {}
    for node, names in wished.items():
        if node not in nodes:
            raise PlanError(f"aimaster.placement names {node!r}; the nodes are {', '.join(nodes)}")
        for name in names:
            if name not in members:
                raise PlanError(f"aimaster.placement puts {name!r} on {node}; the members are {', '.join(members)}")
            if name in fixed:
                raise PlanError(f"aimaster.placement names {name!r} twice")
            fixed[MemberId(name)] = NodeId(node)
    return {member: fixed.get(member, nodes[int(member.rpartition("-")[2]) % len(nodes)]) for member in members}


def plan_command(
    command: Sequence[str],
    *,
    run_id: RunId,
    name: str,
    cwd: str,
    front_pid: int,
    ranks: int | None,
    port: int,
    max_restarts: int,
    environ: Mapping[str, str],
) -> JobPlan:
    """The plan of a wrapped command: `command-0`, or `rank-0` to `rank-(N-1)` on one node, which live and die together."""
    node = NodeId("node-0")
    world = ranks or 1
    # What a killed program has printed but not flushed is lost to the diagnosis.
    calm = {} if "PYTHONUNBUFFERED" in environ else {"PYTHONUNBUFFERED": "1"}
    if world > 1 and "OMP_NUM_THREADS" not in environ:
        calm["OMP_NUM_THREADS"] = "1"
    members = {
        member: MemberSpec(
            member=member,
            role="command",
            rank=rank,
            argv=tuple(command),
            env=calm
            | (
                {}
                if ranks is None
                else rank_variables(rank, world, port=port, run_id=run_id, max_restarts=max_restarts)
            ),
            cwd=cwd,
            reports_progress=False,
        )
        for rank in range(world)
        for member in (MemberId("command-0" if ranks is None else f"rank-{rank}"),)
    }
    return JobPlan(
        run_id=run_id,
        name=name,
        kind="command",
        nodes=(node,),
        members=members,
        placement=dict.fromkeys(members, node),
        restart_scope="job",
        max_restarts=max_restarts,
        front_pid=front_pid,
    )


def rank_variables(rank: int, world: int, *, port: int, run_id: RunId, max_restarts: int) -> dict[str, str]:
    """The variables of torchrun for one rank of one node, at the first start.

    A restart raises TORCHELASTIC_RESTART_COUNT and changes MASTER_PORT. Rank 0 opens the store itself.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": str(max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def command_name(command: Sequence[str]) -> str:
    """A short name for a command: that of its first Python script, module or else of its program."""
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word == "-m" and after:
            return after.rpartition(".")[2]
        if word.endswith(".py"):
            return PurePath(word).stem
    return PurePath(command[0]).stem or "command"
