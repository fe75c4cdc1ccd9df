"""What a snapshot holds: every kind of tensor and value comes back bit-equal, everything else is refused by name."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from easyckpt import Checkpointer, read_weights, shm
from easyckpt.cuda import word_sum
from easyckpt.errors import Mismatch, Unsupported
from easyckpt.layout import DTYPES


@pytest.fixture
def checkpointer(folder):
    with_engine = Checkpointer(folder=folder)
    yield with_engine
    with_engine.close()


def bits(tensor):
    return tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0)


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(bits(a), bits(b))


def random_of(dtype, shape=(5, 7)):
    count = torch.Size(shape).numel() * DTYPES[dtype][0]
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8)
    return raw.view(getattr(torch, dtype)).reshape(shape)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_type_comes_back_bit_equal(checkpointer, dtype):
    """NaNs with their payload, 8-bit floats, booleans, complex numbers; 0-dim, empty, transposed, strided and expanded ones."""
    torch.manual_seed(1)
    base = random_of(dtype, (6, 8))
    state = {
        "plain": base.clone(),
        "scalar": random_of(dtype, ()),
        "empty": random_of(dtype, (0, 3)),
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": base[0].expand(4, 8),
        "row": base[1],
    }
    saved = {name: tensor.clone() for name, tensor in state.items()}
    assert checkpointer.save(1, state)
    checkpointer.wait()
    target = {name: random_of(dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    kept = dict(target)
    assert checkpointer.restore(target).step == 1
    for name, tensor in saved.items():
        assert equal(target[name], tensor), name
        assert target[name] is kept[name]


def test_a_target_of_any_memory_order_is_filled_in_place(checkpointer):
    """The snapshot knows no strides: a transposed or strided target takes it, and its neighbours stay untouched."""
    source = torch.randn(4, 6)
    checkpointer.save(1, {"w": source})
    big = torch.zeros(6, 8)
    checkpointer.restore({"w": big.t()[:4, :6]})
    assert torch.equal(big.t()[:4, :6], source)
    assert big.t()[4:].abs().sum() == 0


def test_lazy_conjugates_and_negatives_are_saved_as_what_they_mean(checkpointer):
    value = torch.randn(3, dtype=torch.complex64)
    checkpointer.save(1, {"conj": value.conj(), "neg": value.conj().imag})
    _, state = checkpointer.load()
    assert torch.equal(state["conj"], value.conj().resolve_conj())
    assert torch.equal(state["neg"], value.conj().imag.resolve_neg())


def test_tied_tensors_are_stored_once_and_stay_tied(checkpointer, folder):
    head = nn.Linear(16, 16, bias=False)
    model = nn.ModuleDict({"embedding": nn.Linear(16, 16, bias=False), "head": head})
    model["embedding"].weight = head.weight
    checkpointer.save(1, {"model": model})
    checkpointer.wait()
    (segment,) = shm.scan(folder)
    assert segment.header.data_bytes == 16 * 16 * 4
    assert [entry.alias_of for entry in segment.header.tensors] == ["", "model/embedding.weight"]
    _, state = checkpointer.load()
    assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
    _, weights = read_weights(segment, prefix="model/")
    assert weights["head.weight"] is weights["embedding.weight"]
    want = head.weight.clone()
    nn.init.zeros_(head.weight)
    checkpointer.restore({"model": model})
    assert torch.equal(model["embedding"].weight, want)


def test_a_view_stores_only_its_own_bytes(checkpointer, folder):
    base = torch.randn(1000, 1000)
    checkpointer.save(1, {"corner": base[:2, :2], "row": base[3]})
    checkpointer.wait()
    (segment,) = shm.scan(folder)
    assert segment.header.data_bytes == 4 * (4 + 1000)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_the_sum_that_tells_a_moved_tensor_on_a_device_sees_every_bit(dtype):
    """It needs no device to be true: equal bits, equal sums; one bit changed, another sum; whatever the shape, type or order in memory."""
    torch.manual_seed(2)
    for tensor in (
        random_of(dtype, (5, 7)),
        random_of(dtype, (8, 6)).t(),
        random_of(dtype, ()),
        random_of(dtype, (9, 4))[::2, 1:],
    ):
        before = int(word_sum(tensor))
        assert int(word_sum(tensor.clone())) == before
        raw = tensor.contiguous().view(-1).view(torch.uint8).clone()
        for at in range(0, raw.numel(), 3):
            raw[at] ^= 1
            assert int(word_sum(raw.view(tensor.dtype))) != before
            raw[at] ^= 1
    assert int(word_sum(random_of(dtype, (0, 3)))) == 0


class Packed(torch.Tensor):
    pass


def nested():
    with warnings.catch_warnings(action="ignore"):  # "a prototype"
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (torch.eye(3).to_sparse(), "sparse"),
        (nested(), "nested"),
        (torch.empty(3, device="meta"), "meta"),
        (torch.eye(3).as_subclass(Packed), "Packed"),
        (object(), "object"),
        (torch.float32, "dtype"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name_and_the_next_save_works(checkpointer, value, named):
    with pytest.raises(Unsupported, match=named) as caught:
        checkpointer.save(1, {"deep": [{"er": value}]})
    assert "deep/0/er" in str(caught.value)
    assert checkpointer.save(1, {"deep": 1})


def test_python_values_come_back_with_their_types(checkpointer):
    values = {"t": (1, 2.5, None), 3: {"x": [True, "é", b"\0\xff"]}, "inf": float("-inf"), "big": 2**200}
    checkpointer.save(1, {"step": 1, "data": values})
    target = {"step": 0, "data": {}}
    checkpointer.restore(target)
    assert target == {"step": 1, "data": values}


def train(model, optimizer, scheduler, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    return model


def build():
    model = nn.Sequential(nn.Linear(8, 300), nn.BatchNorm1d(300), nn.Dropout(0.1), nn.Linear(300, 1))
    groups = [
        {"params": model[0].parameters(), "lr": 0.01},
        {"params": [], "lr": 9.0},
        {"params": [*model[1].parameters(), *model[3].parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.003)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def test_a_fresh_trainer_goes_on_exactly_where_the_saved_one_was(checkpointer):
    """Module, optimizer with an empty group, scheduler: one line each, moments appear in the fresh optimizer, and the next steps are bit-equal."""
    torch.manual_seed(3)
    model, optimizer, scheduler = build()
    train(model, optimizer, scheduler, 3)
    checkpointer.save(3, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    checkpointer.wait()
    generator = torch.get_rng_state()
    want = train(model, optimizer, scheduler, 2).state_dict()

    fresh, fresh_optimizer, fresh_scheduler = build()
    checkpointer.restore({"model": fresh, "optimizer": fresh_optimizer, "scheduler": fresh_scheduler})
    assert [group["lr"] for group in fresh_optimizer.param_groups] == pytest.approx([0.001, 0.9, 0.0003])
    torch.set_rng_state(generator)
    got = train(fresh, fresh_optimizer, fresh_scheduler, 2).state_dict()
    assert all(equal(got[name], want[name]) for name in want)


def test_zero_dim_steps_keep_shape_and_type_under_a_half_precision_model(checkpointer):
    model = nn.Linear(4, 4).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    checkpointer.save(1, {"optimizer": optimizer})
    fresh = torch.optim.AdamW(nn.Linear(4, 4).bfloat16().parameters())
    checkpointer.restore({"optimizer": fresh})
    for state in fresh.state.values():
        assert state["step"].dtype == torch.float32
        assert state["step"].shape == ()
        assert state["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s["model"].update(w=torch.zeros(3)), "'model/w'.*float32.2, 2.*float32.3"),
        (lambda s: s["model"].update(w=torch.zeros(2, 2).half()), "'model/w'.*float32.*float16"),
        (lambda s: s["model"].update(new=torch.zeros(1)), "'model/new' is not in the snapshot"),
        (lambda s: s.update(step=torch.zeros(1)), "'step' is a tensor in the state"),
        (lambda s: s.update(model=nn.Linear(2, 2)), "'model/weight' is not in the snapshot"),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_left_as_it_was(checkpointer, change, named):
    checkpointer.save(5, {"model": {"w": torch.ones(2, 2)}, "step": 5})
    checkpointer.wait()
    state = {"model": {"w": torch.zeros(2, 2)}, "step": 0}
    change(state)
    with pytest.raises(Mismatch, match=named):
        checkpointer.restore(state)
    assert not isinstance(state["model"], dict) or state["model"]["w"].abs().sum() == 0


@pytest.fixture
def mesh(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("outer", "inner"))
    dist.destroy_process_group()


def test_sharded_tensors_keep_their_place_in_the_whole(checkpointer, folder, mesh):
    """Sharded in two dimensions, replicated, both: filled in place; a plain tensor of the whole shape takes them as well."""
    whole = torch.randn(6, 4)
    cuts = {"rows": [Shard(0), Replicate()], "square": [Shard(0), Shard(1)], "all": [Replicate(), Replicate()]}
    state = {name: distribute_tensor(whole, mesh, cut) for name, cut in cuts.items()}
    checkpointer.save(1, state)
    checkpointer.wait()
    (segment,) = shm.scan(folder)
    assert {(entry.global_shape, entry.global_offsets) for entry in segment.header.tensors} == {((6, 4), (0, 0))}
    target = {name: distribute_tensor(torch.zeros(6, 4), mesh, cut) for name, cut in cuts.items()}
    checkpointer.restore(target)
    assert all(torch.equal(one.full_tensor(), whole) for one in target.values())
    plain = {name: torch.zeros(6, 4) for name in cuts}
    checkpointer.restore(plain)
    assert all(torch.equal(one, whole) for one in plain.values())


def test_a_sum_that_is_not_summed_yet_is_refused_by_name(checkpointer, mesh):
    """A partial DTensor has no value before its reduction."""
    partial = DTensor.from_local(torch.ones(3), mesh["outer"], [Partial()])
    with pytest.raises(Unsupported, match=r"'grad'\] is a partial DTensor"):
        checkpointer.save(1, {"grad": partial})


def saved_optimizer(checkpointer, groups, step=5):
    """One step of Adam over layers in such groups, saved."""
    layers = [nn.Linear(3, 3, bias=False) for _ in range(sum(groups))]
    left = list(layers)
    optimizer = torch.optim.Adam([{"params": [left.pop(0).weight for _ in range(size)]} for size in groups])
    sum(layer(torch.ones(1, 3)).sum() for layer in layers).backward()
    optimizer.step()
    checkpointer.save(step, {"optimizer": optimizer, "step": step})
    checkpointer.wait()


@pytest.mark.parametrize("groups", [[1, 2], [3], [2, 1, 0], [2]], ids=str)
def test_an_optimizer_of_other_groups_is_named_and_nothing_is_changed(checkpointer, groups):
    """A parameter added, removed or moved to another group: its moments would go to the wrong one."""
    saved_optimizer(checkpointer, [2, 1])
    other = [[nn.Parameter(torch.zeros(3, 3)) for _ in range(size)] for size in groups]
    state = {"optimizer": torch.optim.Adam([{"params": group} for group in other]), "step": 0}
    with pytest.raises(Mismatch, match=r"'optimizer' has groups of \[2, 1\] parameters"):
        checkpointer.restore(state)
    assert state["step"] == 0
    assert not state["optimizer"].state
    checkpointer.restore(state, strict=False)
    assert state["step"] == 5
    assert not state["optimizer"].state


class Picky:
    """An object that does not take what it gave."""

    def state_dict(self):
        return {"at": 1}

    def load_state_dict(self, state):
        raise KeyError(f"seed is not in {state}")


def test_an_object_that_refuses_its_state_is_named(checkpointer):
    checkpointer.save(1, {"data": {"loader": Picky()}})
    with pytest.raises(Mismatch, match=r"'data/loader', a .*Picky, does not take .*seed"):
        checkpointer.restore({"data": {"loader": Picky()}})


def test_what_fits_is_taken_when_asked_so(checkpointer):
    checkpointer.save(5, {"w": torch.ones(2), "step": 5})
    state = {"w": torch.zeros(2), "new": 7, "step": 0}
    checkpointer.restore(state, strict=False)
    assert state["new"] == 7
    assert state["step"] == 5
    assert state["w"].sum() == 2


def test_many_tensors_need_no_descriptor_each(checkpointer):
    """3,000 tensors, and the process has as many files open as before."""
    import os

    before = len(os.listdir("/proc/self/fd"))
    state = {f"layer.{i}": torch.full((3,), float(i)) for i in range(3000)}
    checkpointer.save(1, state)
    checkpointer.wait()
    target = {name: torch.zeros(3) for name in state}
    checkpointer.restore(target)
    assert all(torch.equal(target[name], state[name]) for name in state)
    assert len(os.listdir("/proc/self/fd")) <= before + 8  # two slots, each open and mapped
