"""The plan: who runs where, with what."""

import msgspec
import pytest

from aimaster.cli.front_plan import PlanError, command_name, place, plan_command, plan_training
from aimaster.settings import JobSettings, load
from aimaster.wire.ids import NodeId, RunId
from aimaster.wire.topology import JobPlan

NODES = (NodeId("node-0"), NodeId("node-1"))


def training(job: JobSettings) -> JobPlan:
    return plan_training(job, run_id=RunId("0a"), name="tiny", python="py", cwd="/w", front_pid=7, steps=90)


def command(ranks: int | None, environ: dict[str, str] | None = None) -> JobPlan:
    return plan_command(
        ["python", "train.py", "--x"],
        run_id=RunId("0a"),
        name="train",
        cwd="/w",
        front_pid=7,
        ranks=ranks,
        port=4321,
        max_restarts=3,
        environ=environ or {},
    )


def test_the_embedded_default_is_planned_as_the_file_says(root):
    """examples/tiny.toml: two nodes, a controller, two policy and two rollout members, one policy and one rollout a node."""
    plan = training(load(root / "examples" / "tiny.toml", [], {}).job)
    assert plan.placement == {
        "controller-0": "node-0",
        "policy-0": "node-0",
        "policy-1": "node-1",
        "rollout-0": "node-0",
        "rollout-1": "node-1",
    }
    assert plan.restart_scope == "member"
    spec = plan.members["policy-1"]
    assert spec.argv == ("py", "-m", "rl_runtime.launch", "policy")
    assert spec.env == {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    assert (spec.role, spec.rank, spec.cwd) == ("policy", 1, "/w")
    assert msgspec.json.decode(msgspec.json.encode(plan), type=JobPlan) == plan


def test_environment_of_a_node_belongs_to_the_node_and_not_to_the_member(root):
    """So that a member which is started elsewhere takes the other node's; `all` belongs to every member."""
    overrides = ["--aimaster.env.node-1.AIMASTER_URL", "http://proxy", "--aimaster.env.all.TZ", "UTC"]
    plan = training(load(root / "examples" / "tiny.toml", overrides, {}).job)
    assert plan.node_env == {"node-1": {"AIMASTER_URL": "http://proxy"}}
    assert {spec.env["TZ"] for spec in plan.members.values()} == {"UTC"}
    assert not any("AIMASTER_URL" in spec.env for spec in plan.members.values())


def test_members_are_dealt_round_the_nodes_role_by_role():
    """Where nothing is wished, the n-th replica of each role lies on the n-th node, round and round."""
    placed = place({"controller": 1, "policy": 3, "rollout": 2}, NODES, {})
    assert [placed[f"policy-{index}"] for index in range(3)] == ["node-0", "node-1", "node-0"]
    assert [placed[f"rollout-{index}"] for index in range(2)] == ["node-0", "node-1"]


def test_a_wished_placement_is_kept_and_the_others_are_dealt():
    """A member that the file places lies there."""
    placed = place({"controller": 1, "policy": 2}, NODES, {"node-1": ["controller-0", "policy-0"]})
    assert placed == {"controller-0": "node-1", "policy-0": "node-1", "policy-1": "node-1"}


@pytest.mark.parametrize(
    ("wished", "said"),
    [
        ({"node-9": ["policy-0"]}, "node-9"),
        ({"node-0": ["policy-9"]}, "policy-9"),
        ({"node-0": ["policy-0"], "node-1": ["policy-0"]}, "twice"),
    ],
)
def test_an_impossible_placement_is_refused_by_name(wished, said):
    """A node or member that is not there, and a member at two places, are named."""
    with pytest.raises(PlanError, match=said):
        place({"policy": 1}, NODES, wished)


def test_a_plain_command_is_one_member_without_ranks():
    """Without --nproc-per-node the command gets none of torchrun's variables and is passed untouched."""
    plan = command(None)
    assert list(plan.members) == ["command-0"]
    spec = plan.members["command-0"]
    assert spec.argv == ("python", "train.py", "--x")
    assert "RANK" not in spec.env
    assert not spec.reports_progress
    assert plan.restart_scope == "job"


def test_ranks_get_the_variables_of_torchrun():
    """Each rank knows itself, the world, where to meet, and how often it was restarted."""
    plan = command(2)
    env = plan.members["rank-1"].env
    assert {
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "4321",
        "TORCHELASTIC_RUN_ID": "0a",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }.items() <= env.items()
    assert plan.members["rank-1"].rank == 1
    assert env["OMP_NUM_THREADS"] == "1"


def test_what_the_user_set_is_left_alone():
    """Thread count and buffering of the user's environment are not overridden."""
    env = command(2, {"OMP_NUM_THREADS": "8", "PYTHONUNBUFFERED": ""}).members["rank-0"].env
    assert "OMP_NUM_THREADS" not in env
    assert "PYTHONUNBUFFERED" not in env


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["python", "train.py"], "train"),
        (["torchrun", "--nproc-per-node", "2", "dir/fine.tune.py", "--data", "x.py"], "fine.tune"),
        (["python", "-m", "package.train", "a"], "train"),
        (["/usr/bin/sleep", "3"], "sleep"),
        (["bash", "-c", "true"], "bash"),
    ],
)
def test_a_command_is_named_after_its_script(words, name):
    """The run folder of a command carries the name of its script, module or program."""
    assert command_name(words) == name
