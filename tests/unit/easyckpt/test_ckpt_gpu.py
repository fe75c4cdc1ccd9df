"""The same promises for CUDA tensors: `pytest -m gpu`."""

import gc
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn

from easyckpt import RandomState, shm, snapshot
from easyckpt.errors import SaveFailed
from easyckpt.layout import DTYPES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")]
MODES = ["overlap", "copy", "protect"]
LONG_CYCLES = 400_000_000
"""Of the device's clock: some tenths of a second in which the training stream is busy."""


def build(width=2000):
    layers = [nn.Linear(width, width), nn.Dropout(0.1), nn.BatchNorm1d(width), nn.Linear(width, 10)]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.randn(8, model[0].in_features, device="cuda")).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer):
    return {"model": model, "optimizer": optimizer, "rng": RandomState()}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_right_after_the_save_never_shows_in_it(engine, mode):
    """Parameters, moments, BatchNorm buffers and 0-dim steps, with the training stream running on; nobody reads the copy before it is there."""
    torch.manual_seed(0)
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine(mode=mode)
    checkpointer.prepare(state_of(model, optimizer))
    for number in range(1, 6):
        want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        moment = optimizer.state[model[0].weight]["exp_avg"].clone()
        counted = optimizer.state[model[0].weight]["step"].clone()
        checkpointer.save(number, state_of(model, optimizer))
        for _ in range(3):
            step(model, optimizer)
        _, state = checkpointer.load()
        assert all(torch.equal(state["model"][name].cuda(), want[name]) for name in want)
        assert torch.equal(state["optimizer"]["state"][0]["exp_avg"].cuda(), moment)
        assert state["optimizer"]["state"][0]["step"] == counted.cpu()


def test_the_host_waits_for_nothing_and_the_optimizer_for_the_copy_only(engine):
    """On a busy device `save` returns long before the copies can have begun; the optimizer's step waits for them and no longer."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.prepare(state_of(model, optimizer))
    checkpointer.save(1, state_of(model, optimizer))
    checkpointer.wait()
    want = model[0].weight.clone()
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    before.record()
    checkpointer.save(2, state_of(model, optimizer))
    assert not before.query(), "save waited for the device"
    job = checkpointer._saver._job
    assert job is not None
    assert not job.copied.is_set()
    optimizer.zero_grad()
    model(torch.randn(8, 2000, device="cuda")).sum().backward()
    optimizer.step()
    assert job.copied.is_set()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"].cuda(), want)


def test_copies_go_straight_into_the_segments_own_pages(engine):
    """The memory is registered with the driver, so that a copy is one transfer and does not hold the host; it is let go at the end."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.prepare(state_of(model, optimizer))
    checkpointer.save(1, state_of(model, optimizer))
    checkpointer.wait()
    slots = checkpointer._saver._slots
    assert all(slot._registered for slot in slots)
    header = shm.scan(checkpointer.folder)[0].header
    large = next(entry for entry in header.tensors if entry.name == "model/0.weight")
    block = slots[0].view()
    assert snapshot.view_at(block, large).is_pinned()
    block.release()
    gc.collect()
    addresses = [slot.address for slot in slots]
    checkpointer.close()
    for address in addresses:
        assert torch.cuda.cudart().cudaHostUnregister(address) != 0  # nothing is registered there any more


def test_a_save_takes_no_device_memory_for_large_tensors(engine):
    """Only what may change before the optimizer (buffers, small tensors) is cloned on the device."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    for number in (1, 2, 3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        checkpointer.save(number, state_of(model, optimizer))
        checkpointer.wait()
        assert torch.cuda.max_memory_allocated() - before < model[0].weight.nbytes


def test_restoring_into_device_memory_goes_on_bit_equal(engine):
    """Dropout on the device included: its generator is restored as well."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.save(1, state_of(model, optimizer))
    for _ in range(3):
        step(model, optimizer)
    want = model[0].weight.clone()
    fresh, fresh_optimizer = build()
    step(fresh, fresh_optimizer)
    checkpointer.restore(state_of(fresh, fresh_optimizer))
    for _ in range(3):
        step(fresh, fresh_optimizer)
    assert torch.equal(fresh[0].weight, want)


@pytest.mark.parametrize("tier", ["shm", "storage"])
def test_a_restore_fills_the_tensors_that_are_there(engine, tmp_path, tier):
    """In place, without a second copy on the device, from memory and from storage."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine(tmp_path)
    checkpointer.save(1, state_of(model, optimizer))
    checkpointer.wait()
    want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    places = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.zero_()
    if tier == "storage":
        for path in checkpointer.folder.glob("*.safetensors"):
            path.unlink()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    assert checkpointer.restore({"model": model}, only=["model"]).tier == tier
    assert torch.cuda.max_memory_allocated() - before < model[0].weight.nbytes
    assert {name: tensor.data_ptr() for name, tensor in model.state_dict().items()} == places
    assert all(torch.equal(tensor, want[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_and_shape_comes_back_bit_equal(engine, dtype, mode):
    """Beside host tensors in one state; 0-dim, empty, transposed, strided."""
    torch.manual_seed(1)
    width = DTYPES[dtype][0]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (300, 400 * width), dtype=torch.uint8)
    host = raw.view(getattr(torch, dtype))
    device = host.cuda()
    state = {
        "host": host,
        "device": device,
        "t": device.t(),
        "part": device[::3, 5:9],
        "one": device[0, 0],
        "none": device[:0],
    }
    saved = {name: tensor.contiguous().cpu().clone() for name, tensor in state.items()}
    checkpointer = engine(mode=mode)
    checkpointer.save(1, state)
    checkpointer.wait()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpointer.restore(target)
    for name, want in saved.items():
        assert target[name].device == state[name].device
        got = target[name].contiguous().cpu()
        assert torch.equal(got.reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8)), name


def test_a_tensor_on_the_device_that_something_else_changed_is_named(engine, monkeypatch):
    """A parameter changes before its copy began: the torn snapshot is not sealed, and the tensor is copied at once from then on."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.save(1, state_of(model, optimizer))
    checkpointer.wait()
    go, copy = threading.Event(), snapshot.Copy.copy
    with monkeypatch.context() as patch:
        patch.setattr(snapshot.Copy, "copy", lambda this, leaves: (go.wait(30), copy(this, leaves)))
        checkpointer.save(2, state_of(model, optimizer))
        with torch.no_grad():
            model[0].weight.add_(1)
        torch.cuda.synchronize()
        go.set()
        with pytest.raises(SaveFailed, match=r"model/0\.weight"):
            checkpointer.wait()
    checkpointer.save(3, state_of(model, optimizer))
    want = model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.add_(1)
    checkpointer.wait()
    assert torch.equal(checkpointer.load()[1]["model"]["0.weight"].cuda(), want)


def test_the_first_saves_read_nothing_back_to_prove_what_moved(engine):
    """The proof is made on the device: also the first save returns while the device is busy."""
    model, optimizer = build()
    step(model, optimizer)
    checkpointer = engine()
    checkpointer.prepare(state_of(model, optimizer))
    torch.cuda.synchronize()
    before = torch.cuda.Event()
    torch.cuda._sleep(LONG_CYCLES)
    before.record()
    checkpointer.save(1, {"model": model, "optimizer": optimizer})
    assert not before.query()
    checkpointer.wait()
    assert checkpointer.events.counts["tensor_moved"] == 0


def test_sharded_parameters_on_the_device(engine, tmp_path):
    """FSDP2 on one rank: DTensors and their moments, saved and restored into a fresh model and optimizer."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        model, optimizer = _sharded(fully_shard)
        step(model, optimizer)
        checkpointer = engine()
        checkpointer.save(1, state_of(model, optimizer))
        want = model[0].weight.full_tensor().clone()
        moment = optimizer.state[model[0].weight]["exp_avg"].full_tensor().clone()
        step(model, optimizer)
        fresh, fresh_optimizer = _sharded(fully_shard)
        assert checkpointer.restore(state_of(fresh, fresh_optimizer)).step == 1
        assert torch.equal(fresh[0].weight.full_tensor(), want)
        assert torch.equal(fresh_optimizer.state[fresh[0].weight]["exp_avg"].full_tensor(), moment)
    finally:
        dist.destroy_process_group()


def _sharded(fully_shard):
    model = fully_shard(nn.Sequential(nn.Linear(500, 301), nn.Linear(301, 10)).cuda())
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
