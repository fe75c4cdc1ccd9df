"""No key is taken in silence: it is honoured, refused, or said to be without effect."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from aimaster.settings import GrpoSettings, load
from aimaster.settings.case import look
from aimaster.settings.check import fields_of, known_keys
from aimaster.settings.effects import GPU_ONLY, GRPO, HONOURED, REFUSED

READERS = ("rl_runtime", "agents", "aimaster")
# Read by a name of its own only in a rule that sets another key from it.
BY_RULE = {"redis", "custom", f"{GRPO}.type"}


def read_attributes(root: Path) -> set[str]:
    """Every attribute that the programs and the rules read anywhere."""
    found: set[str] = set()
    for package in READERS:
        for path in (root / package).rglob("*.py"):
            if path.name != "effects.py":
                nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
                found |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    return found


def test_the_three_kinds_are_apart() -> None:
    """A key is of one kind, and each named key is a key."""
    known = set(known_keys())
    known |= {f"{GRPO}.type", "policy.lora"}
    assert not HONOURED & set(REFUSED)
    for keys in (HONOURED, REFUSED, GPU_ONLY):
        assert not set(keys) - known


def test_what_is_honoured_is_read(root: Path) -> None:
    """Each honoured key is read somewhere in the programs or the rules."""
    read = read_attributes(root)
    unread = [key for key in sorted(HONOURED - BY_RULE) if key.rpartition(".")[2] not in read]
    assert unread == []


def test_what_is_ours_is_read(root: Path) -> None:
    """Each key of [aimaster] is read somewhere: none is an empty promise."""
    read = read_attributes(root)
    sizes = {
        f"aimaster.model.{name}"
        for name in fields_of(type(load(None, ["--aimaster.model.hidden_size=64"], {}).job.aimaster.model))
    }
    ours = {key for key in known_keys() if key.startswith("aimaster.")} - sizes
    assert [key for key in sorted(ours) if key.rpartition(".")[2] not in read] == []


def test_keys_without_effect_are_said_once(tmp_path: Path) -> None:
    """Keys that somebody gave and that do nothing here are named in one line; defaults, and honoured keys, are not."""
    path = tmp_path / "job.toml"
    path.write_text(
        "[train]\nepoch = 3\ncoalesce_weight_sync = true\nsequence_packing = false\n[logging]\nreport_mfu = true\n",
        encoding="utf-8",
    )
    notes = [note.text for note in load(path, [], {}, gpus=0).notes if "without effect" in note.text]
    assert notes == ["kept, without effect in this runtime: logging.report_mfu, train.coalesce_weight_sync"]
    assert not any("without effect" in note.text for note in load(None, [], {}, gpus=0).notes)


@pytest.mark.parametrize("name", ["tiny", "smollm2"])
def test_the_examples_give_no_idle_key(root: Path, name: str) -> None:
    """Everything that a shipped example says has an effect."""
    resolved = load(root / "examples" / f"{name}.toml", [], {}, gpus=0)
    assert [str(note) for note in resolved.notes if "effect" in note.text] == []


def test_names_of_grpo_keys_are_unambiguous() -> None:
    """A GRPO key's name is not also that of another honoured key, so that reading one is not taken for the other."""
    names = Counter(key.rpartition(".")[2] for key in HONOURED if "parallelism" not in key)
    assert {name for name, count in names.items() if count > 1} <= {"name", "seed", "batch_size", "temperature"}
    assert isinstance(look(load(None, [], {}, gpus=0).job, GRPO), GrpoSettings)
