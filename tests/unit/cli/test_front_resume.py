"""An unfinished run goes on only with the configuration that it was begun with, save for what may change."""

from pathlib import Path

import pytest

from aimaster.cli.exits import UsageError
from aimaster.cli.front_resume import MAY_CHANGE, check_resume
from aimaster.settings import load, to_json
from aimaster.settings.check import known_keys
from aimaster.wire.places import RunPlaces

TINY = Path(__file__).parents[3] / "examples" / "tiny.toml"


def resolved(*flags, secret="first-secret"):
    return load(TINY, flags, {"AIMASTER_CUSTOM__API_TOKEN": secret}, gpus=0)


@pytest.fixture
def begun(tmp_path):
    """The folder of a run that has a ledger."""
    places = RunPlaces(tmp_path)
    places.resolved.write_bytes(to_json(resolved()))
    places.ledger.mkdir(parents=True)
    return places


def test_the_same_configuration_goes_on_without_a_word(begun):
    """Nothing changed, nothing said."""
    assert check_resume(begun, resolved().job) == []


def test_what_may_change_is_told(begun):
    """The length of the run, leases and drills are of the start, not of the run."""
    flags = ("--train.max_num_steps=7", "--aimaster.leases.prompt_seconds=9", "--aimaster.drill=kill:policy-0@2")
    told = check_resume(begun, resolved(*flags).job)
    assert [line.split(":")[0] for line in told] == [
        "aimaster.drill",
        "aimaster.leases.prompt_seconds",
        "train.max_num_steps",
    ]
    assert told[-1].endswith(" then, 7 now")


@pytest.mark.parametrize(
    ("flag", "key", "values"),
    [
        ("--aimaster.model.hidden_size=128", "aimaster.model.hidden_size", ("64", "128")),
        ("--rollout.n_generation=4", "rollout.n_generation", ("8", "4")),
        ("--train.optm_lr=0.5", "train.optm_lr", ("then", "0.5")),
        ("--aimaster.task=add2", "aimaster.task", ('"sort6"', '"add2"')),
    ],
)
def test_what_decides_model_data_or_ledger_is_refused_with_both_values(begun, flag, key, values):
    """All such keys at once, before anything starts, and what to do."""
    with pytest.raises(UsageError, match=r"Use the old values .* --run-dir") as refused:
        check_resume(begun, resolved(flag, "--train.seed=99").job)
    text = str(refused.value)
    assert refused.value.exit_code == 2
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{key}:"))
    assert all(value in line for value in values)
    assert "train.seed" in text


def test_a_secret_is_not_shown(begun):
    """What a free table's key calls a secret is hidden in the refusal too."""
    with pytest.raises(UsageError, match=r"custom\.api_token") as refused:
        check_resume(begun, resolved(secret="second-secret").job)
    assert "second-secret" not in str(refused.value)
    assert "first-secret" not in str(refused.value)


def test_before_the_ledger_nothing_depends_on_old_values(begun):
    """A start that failed on a wrong key is mended in the same folder."""
    begun.ledger.rmdir()
    assert check_resume(begun, resolved("--aimaster.model.hidden_size=128").job) == []


def test_an_unreadable_record_is_named(begun):
    """A damaged resolved.json is never taken for sameness."""
    begun.resolved.write_text("{")
    with pytest.raises(UsageError, match=r"resolved\.json cannot be read"):
        check_resume(begun, resolved().job)


def test_every_key_that_may_change_is_one():
    """No entry names what is not in the configuration."""
    known = list(known_keys())
    assert [key for key in MAY_CHANGE if not any(one == key or one.startswith(f"{key}.") for one in known)] == []
