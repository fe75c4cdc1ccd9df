"""The state every engine saves, and the proof that what comes back is one step's.

A GPT-like model with AdamW, 401 tensors: parameters, two moments each, 0-dim steps, the random state. In step s every element of tensor i is s + i.
"""

import time

import torch

LAYERS = 12


def make(nbytes):
    """About `nbytes` of fp32 tensors, all pages touched."""
    parameters = nbytes // 12  # weight and two moments of 4 bytes each
    width = int((0.85 * parameters / (12 * LAYERS)) ** 0.5) // 8 * 8
    shapes = {"wte.weight": (int(0.15 * parameters / width), width), "wpe.weight": (1024, width)}
    for layer in range(LAYERS):
        shapes |= {
            f"h.{layer}.{name}": shape
            for name, shape in {
                "ln_1.weight": (width,),
                "attn.qkv.weight": (3 * width, width),
                "attn.qkv.bias": (3 * width,),
                "attn.proj.weight": (width, width),
                "ln_2.weight": (width,),
                "mlp.fc.weight": (4 * width, width),
                "mlp.fc.bias": (4 * width,),
                "mlp.proj.weight": (width, 4 * width),
            }.items()
        }
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    model = {name: torch.ones(shape) for name, shape in shapes.items()}
    moments = {
        name: {"step": torch.tensor(0.0), "exp_avg": torch.ones(shape), "exp_avg_sq": torch.ones(shape)}
        for name, shape in shapes.items()
    }
    groups = [{"lr": 1e-3, "betas": [0.9, 0.95], "params": list(shapes)}]
    return {
        "model": model,
        "optim": {"state": moments, "param_groups": groups},
        "step": 0,
        "rng": torch.get_rng_state(),
    }


def tensors(value, path=""):
    """(path, tensor), depth first."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict | list | tuple):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from tensors(item, f"{path}/{key}" if path else str(key))


def size(state):
    return sum(tensor.nbytes for _, tensor in tensors(state))


@torch.no_grad()
def stamp(state, step):
    """What an optimizer would do: rewrites every tensor in place."""
    for index, (name, tensor) in enumerate(tensors(state)):
        if name != "rng":
            tensor.fill_(float(step + index))
    state["step"] = step


def wrong(state, step):
    """What is not of `step`; nothing if every element is."""
    if int(state["step"]) != step:
        return f"step {state['step']} instead of {step}"
    for index, (name, tensor) in enumerate(tensors(state)):
        if name != "rng" and not bool((tensor == float(step + index)).all()):
            return f"{name} is torn or stale"
    return ""


@torch.no_grad()
def copy_into(target, source):
    found = dict(tensors(source))
    for name, tensor in tensors(target):
        tensor.copy_(found[name])
    target["step"] = source["step"]


class Work:
    """What training does beside: matmuls of a few milliseconds."""

    def __init__(self, width=512):
        self.a, self.b, self.c = torch.randn(width, width), torch.randn(width, width), torch.empty(width, width)

    def for_seconds(self, seconds):
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            torch.mm(self.a, self.b, out=self.c)

    def units(self, count):
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.c)

    def rate(self, is_over):
        """Units a second until `is_over`."""
        count, started = 0, time.perf_counter()
        while True:
            self.units(4)
            count += 4
            if is_over():
                return count / (time.perf_counter() - started)
