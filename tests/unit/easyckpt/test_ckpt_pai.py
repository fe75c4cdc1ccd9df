"""The calls of PAI's EasyCKPT."""

import shutil

import pytest
import torch
import torch.distributed as dist
from torch import nn

from easyckpt import shm
from easyckpt.adapters import pai
from easyckpt.errors import EasyckptError
from easyckpt.storage import list_manifests


@pytest.fixture
def where(tmp_path, monkeypatch):
    monkeypatch.setenv("EASYCKPT_RESUME_PATH", str(tmp_path / "ckpts"))
    yield tmp_path / "ckpts"
    pai.finalize_easyckpt()
    shutil.rmtree(shm.default_folder(tmp_path / "ckpts"), ignore_errors=True)


def parts(seed):
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


def test_a_script_written_for_it_saves_and_resumes(where, tmp_path):
    """Memory every 2 steps, storage every 4; the third call of the next run starts at the newest of both."""
    pai.initialize_easyckpt(
        save_mem_interval=2, save_storage_interval=4, max_ckpt_num=5, log_file_path=str(tmp_path / "log")
    )
    model, optimizer, scheduler = parts(0)
    assert pai.load_checkpoint(model, optimizer, scheduler) == 0
    saved = []
    for iteration in range(1, 8):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        scheduler.step()
        if pai.save_checkpoint_if_needed(iteration, model, optimizer, scheduler):
            saved.append(iteration)
            want = model.weight.clone()
    assert saved == [2, 4, 6]
    pai.finalize_easyckpt()
    assert {record.step for record in list_manifests(where)} >= {6}
    logged = (tmp_path / "log").read_text()
    assert "save_sealed" in logged
    assert "flush_committed" in logged
    pai.initialize_easyckpt(2, 4, 5)
    again, optimizer, scheduler = parts(1)
    assert pai.load_checkpoint(again, optimizer, scheduler) == 6
    assert torch.equal(again.weight, want)
    assert scheduler.last_epoch == 6
    assert "restored" in (tmp_path / "log").read_text() or (tmp_path / "log").exists()


def test_calls_out_of_order_are_told(where):
    with pytest.raises(EasyckptError, match="initialize_easyckpt first"):
        pai.load_checkpoint(nn.Linear(1, 1))
    with pytest.raises(EasyckptError, match="at least 1"):
        pai.initialize_easyckpt(0, 1, 1)


def test_ranks_are_those_of_the_process_group_else_of_the_launcher(where, tmp_path, monkeypatch):
    """A job's platform counts nodes in WORLD_SIZE; once the process group is there it is what counts."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    engine = pai.initialize_easyckpt()
    assert (engine.rank, engine.ranks) == (1, 3)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        engine = pai.initialize_easyckpt()
        assert (engine.rank, engine.ranks) == (0, 1)
    finally:
        dist.destroy_process_group()
