"""Gradients that are kept: whole or absent, named by their step, never at the step's cost."""

import os

import pytest
import torch

from aimaster.wire.checkpoint import Version
from aimaster.wire.places import RunPlaces
from rl_runtime.policy.gradients import GradientNote, file_name, keep_gradient, kept_gradients, read_gradient

NOTE = GradientNote(version=Version(1, 12), epoch=3, batch_digest="ab", shares=(0, 2), learning_rate=3e-4)


def parts():
    flat = torch.arange(10.0)
    return {"first": flat[:4].view(2, 2), "second": flat[4:]}


def test_what_is_kept_is_read_back(tmp_path):
    """Views of one flat tensor come back under their names, with the note."""
    assert keep_gradient(tmp_path / "gradients", NOTE, parts())
    note, tensors = read_gradient(tmp_path / "gradients" / file_name(NOTE.version))
    assert note == NOTE
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        "first": [[0.0, 1.0], [2.0, 3.0]],
        "second": [4.0, 5.0, 6.0, 7.0, 8.0, 9.0],
    }
    assert os.listdir(tmp_path / "gradients") == ["1-12.safetensors"]


def test_a_step_kept_again_replaces_the_first(tmp_path):
    """A member that is told twice, or comes to the step again, leaves one whole file."""
    keep_gradient(tmp_path, NOTE, {"only": torch.zeros(2)})
    keep_gradient(tmp_path, NOTE, {"only": torch.ones(2)})
    assert read_gradient(tmp_path / "1-12.safetensors")[1]["only"].tolist() == [1.0, 1.0]


def test_a_fault_costs_nothing_but_the_file(tmp_path):
    """A folder that cannot be made, or a file in its place: said as False, nothing raised, nothing left behind."""
    (tmp_path / "taken").write_text("")
    assert not keep_gradient(tmp_path / "taken" / "gradients", NOTE, parts())
    (tmp_path / "gradients" / "1-12.safetensors").mkdir(parents=True)
    assert not keep_gradient(tmp_path / "gradients", NOTE, parts())
    assert os.listdir(tmp_path / "gradients") == ["1-12.safetensors"]


@pytest.mark.parametrize("name", ["0-7.safetensors", "notes.txt", ".0-8.safetensors.part", "x-1.safetensors"])
def test_the_files_of_a_run_are_found_by_step(tmp_path, name):
    """All members' files of a version are found, and nothing else is taken for one."""
    for member in ("policy-0", "policy-1"):
        keep_gradient(tmp_path / "nodes" / "node-0" / "members" / member / "gradients", NOTE, parts())
    (tmp_path / "nodes/node-0/members/policy-0/gradients" / name).write_bytes(b"")
    found = kept_gradients(RunPlaces(tmp_path))
    assert [path.parts[-3] for path in found[Version(1, 12)]] == ["policy-0", "policy-1"]
    assert set(found) == {Version(1, 12), *([Version(0, 7)] if name == "0-7.safetensors" else [])}
