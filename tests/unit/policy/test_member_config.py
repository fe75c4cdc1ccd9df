"""What members take from a job's configuration, and what they refuse by name."""

import select
import subprocess
import sys

import msgspec
import pytest

from aimaster.settings import load
from rl_runtime.config import HangDrill, UnsupportedSettingError, hang_drills, policy_settings, rollout_settings
from rl_runtime.drills import Drills


def job(root, *flags):
    return load(str(root / "examples" / "tiny.toml"), list(flags), {}).job


def test_the_example_job_is_derived(root):
    """The embedded default: a fresh tiny model, its own engine, all slots of a batch."""
    policy, rollout = policy_settings(job(root)), rollout_settings(job(root))
    assert policy.model == rollout.model
    assert policy.model.shape is not None
    assert policy.engine == rollout.engine == "tiny"
    assert policy.loss.epsilon_high == 0.28
    assert policy.optimizer.betas == (0.9, 0.95)
    assert policy.warm_start.steps > 0
    assert rollout.slots == job(root).rollout.batch_size * job(root).rollout.n_generation


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--train.train_policy.kl_beta", "0.1"], "kl_beta"),
        (["--train.train_policy.mu_iterations", "2"], "mu_iterations"),
        (["--rollout.sampling_config.top_p", "0.9"], "top_p"),
        (["--rollout.sampling_config.top_k", "20"], "top_k"),
    ],
)
def test_what_is_not_done_is_refused_by_name(root, flags, named):
    """A key that asks for what this runtime does not do is never half honoured."""
    with pytest.raises(UnsupportedSettingError, match=named):
        policy_settings(job(root, *flags))


def test_hangs_are_found_among_the_drills():
    """Only hangs are the member's own to inflict; the form is asleep in C unless said."""
    drills = hang_drills("kill:policy-1@20, hang:policy-0@30,hang:rollout-1@5:pipe")
    assert drills == (HangDrill(member="policy-0", step=30), HangDrill(member="rollout-1", step=5, how="pipe"))
    with pytest.raises(msgspec.ValidationError):
        hang_drills("hang:policy-0@3:dancing")


def test_a_drill_is_for_its_member_and_first_start_only(monkeypatch):
    """Due at its step or the first one after it; a restarted member does not hang again."""
    hung = []
    monkeypatch.setattr("rl_runtime.drills.hang", hung.append)
    drill = HangDrill(member="policy-0", step=3, how="spin")
    for member, incarnation in (("policy-1", 0), ("policy-0", 1)):
        Drills((drill,), member=member, incarnation=incarnation).at(9)
    mine = Drills((drill,), member="policy-0", incarnation=0)
    mine.at(2)
    assert hung == []
    mine.at(4)
    assert hung == ["spin"]


HANGS = """
import sys, threading, time
from rl_runtime.drills import hang
def count():
    while True:
        print("alive", flush=True)
        time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()
time.sleep(0.1)
print("hanging", flush=True)
hang(sys.argv[1])
"""


@pytest.mark.parametrize(("how", "others_run"), [("gil", False), ("pipe", True), ("spin", True)])
def test_hangs_are_true_hangs(root, how, others_run):
    """Asleep with the lock held no other thread runs; blocked or spinning, others do. None of them ends by itself."""
    process = subprocess.Popen([sys.executable, "-c", HANGS, how], stdout=subprocess.PIPE, bufsize=0, cwd=root)
    try:
        told = b""
        while b"hanging\n" not in told:
            told += process.stdout.read(1)
        if others_run:
            assert process.stdout.read(1)  # another line of the counting thread
        else:
            if select.select([process.stdout], [], [], 0.2)[0]:
                process.stdout.read(6)  # one was on its way
            assert not select.select([process.stdout], [], [], 0.5)[0]
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_typo_in_the_role_is_told_without_importing_torch(root):
    """Parse first, import heavy things after."""
    code = "import sys; sys.argv = ['launch', 'polcy']; from rl_runtime.launch import main; print(main()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "2"
    assert "usage" in done.stderr


def test_the_tiny_models_members_do_not_import_transformers(root):
    """A restarted member of a small run imports torch alone, which is half of its start."""
    code = (
        "import sys, rl_runtime.policy.main, rl_runtime.rollout.main, rl_runtime.rollout.tiny;"
        "assert 'torch' in sys.modules; print([name for name in ('transformers', 'aiohttp', 'pyarrow', 'math_verify') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"
