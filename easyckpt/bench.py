"""This machine's floor and what the engine makes of it, in a minute: `python -m easyckpt.bench [--gib 0.25] [--storage FOLDER] [--json]`.

The floor is no engine: one copy_ per tensor into, and out of, shared memory that was touched before. Floor and engine take turns in one process,
and the ratio of their medians is the figure: seconds depend on what else the machine does. Everything is verified as in any run.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click
import msgspec
import torch

from easyckpt import shm
from easyckpt.engine import Checkpointer
from easyckpt.errors import EasyckptError

LAYERS = 24
ALIGNED_BYTES = 64
TIMES_THE_STATE = 4
"""Memory it needs: the state, the floor's, two slots."""
_seconds = time.perf_counter


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison."""

    what: str
    """What both did."""
    floor_ms: float
    """Median, of what the machine can do at best."""
    ours_ms: float
    """Median, of the engine."""

    @property
    def ratio(self) -> float:
        return self.ours_ms / self.floor_ms if self.floor_ms else 0.0


class Floor:
    """Shared memory for one state, touched."""

    def __init__(self, path: Path, tensors: list[torch.Tensor]) -> None:
        self._path = path
        self._tensors = tensors
        self._total = sum(-(-one.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for one in tensors)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        shm.allocate(fd, self._total, str(path))
        os.close(fd)
        self._views = list(self._map())
        for view in self._views:
            view.zero_()

    def save(self) -> None:
        for view, tensor in zip(self._views, self._tensors, strict=True):
            view.copy_(tensor)

    def restore(self) -> None:
        """As a new process would: the pages have to be mapped again."""
        for view, tensor in zip(self._map(), self._tensors, strict=True):
            tensor.copy_(view)

    def close(self) -> None:
        self._path.unlink()

    def _map(self) -> Iterator[torch.Tensor]:
        with self._path.open("r+b") as file:
            memory, at = mmap.mmap(file.fileno(), self._total), 0
        for tensor in self._tensors:
            flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=at)
            yield flat.view(tensor.shape)
            at += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES


class Training:
    """A model's weights and their two moments, and an optimizer that rewrites them all in a step."""

    def __init__(self, nbytes: int) -> None:
        width = max(8, int((nbytes / (LAYERS * 3 * 4)) ** 0.5))
        self.weights = [torch.nn.Parameter(torch.ones(width, width)) for _ in range(LAYERS)]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3, foreach=False)
        for weight in self.weights:
            weight.grad = torch.ones_like(weight)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.state = {
            "model": {str(index): weight for index, weight in enumerate(self.weights)},
            "optimizer": self.optimizer,
        }
        self._work = torch.ones(512, 512)

    @property
    def tensors(self) -> list[torch.Tensor]:
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return [one.detach() for one in (*self.weights, *moments)]

    @torch.no_grad()
    def rewrite(self, number: int) -> None:
        for tensor in self.tensors:
            tensor.fill_(float(number))

    def is_at(self, number: int) -> bool:
        return all(bool((tensor == float(number)).all()) for tensor in self.tensors)

    def compute(self, seconds: float) -> None:
        """Stands for forward and backward."""
        until = _seconds() + seconds
        while _seconds() < until:
            torch.mm(self._work, self._work)

    def step(self) -> None:
        """Without gradients it changes nothing; what runs before every optimizer's step runs."""
        self.optimizer.step()


def timed(action: Callable[[], object]) -> float:
    started = _seconds()
    action()
    return _seconds() - started


def copies(training: Training, folder: Path, rounds: int, tick: Callable[[], None]) -> tuple[list[Line], float]:
    """Copying in and out, floor and engine in turn; and the seconds in which the engine opened."""
    floor = Floor(folder / "floor", training.tensors)
    engine = Checkpointer(None, folder=folder, mode="copy", on_event=_quiet)
    opened = timed(lambda: engine.prepare(training.state))
    seen: dict[str, list[float]] = {"floor in": [], "in": [], "floor out": [], "out": []}
    for number in range(1, rounds + 1):
        training.rewrite(number)
        seen["floor in"].append(timed(floor.save))
        seen["in"].append(timed(partial(engine.save, number, training.state)))
        engine.wait()
        training.rewrite(-1)
        seen["floor out"].append(timed(floor.restore))
        training.rewrite(-1)
        seen["out"].append(timed(lambda: engine.restore(training.state)))
        if not training.is_at(number):
            raise click.ClickException(f"what came back in round {number} is not what was saved")
        tick()
    engine.close()
    floor.close()
    median = {name: 1000 * statistics.median(values) for name, values in seen.items()}
    lines = [
        Line(what="save, copy mode: until training goes on", floor_ms=median["floor in"], ours_ms=median["in"]),
        Line(what="restore from memory, verified", floor_ms=median["floor out"], ours_ms=median["out"]),
    ]
    return lines, opened


def overlapped(training: Training, folder: Path, rounds: int, copy_ms: float, tick: Callable[[], None]) -> Line:
    """What training waits for where forward and backward take twice as long as the copy."""
    waits: list[float] = []
    engine = Checkpointer(
        None,
        folder=folder,
        on_event=lambda event: waits.append(event.seconds) if event.kind == "save_waited" else None,
    )
    engine.prepare(training.state)
    seen = []
    for number in range(1, rounds + 3):
        waits.clear()
        stall = timed(partial(engine.save, number, training.state))
        training.compute(2 * copy_ms / 1000)
        training.step()
        seen.append(1000 * (stall + sum(waits)))
        engine.wait()
        tick()
    engine.close()
    # The first two saves prove that nothing but the optimizer changes the state, and cost a hash.
    return Line(what="save, overlapped: until training goes on", floor_ms=copy_ms, ours_ms=statistics.median(seen[2:]))


def durable(training: Training, folder: Path, storage: Path, rounds: int, tick: Callable[[], None]) -> Line:
    """To storage and synced, beside torch.save."""
    engine = Checkpointer(storage / "easyckpt", folder=folder, keep=1, mode="copy", on_event=_quiet)
    engine.prepare(training.state)
    theirs, ours = [], []
    for number in range(1, rounds + 2):
        started = _seconds()
        engine.save(number, training.state)
        engine.wait()
        ours.append(_seconds() - started)
        theirs.append(timed(lambda: _torch_save(training.tensors, storage / "torch.pt")))
        tick()
    engine.close()
    return Line(
        what="save, until it is on storage (beside torch.save)",
        floor_ms=1000 * statistics.median(theirs[1:]),
        ours_ms=1000 * statistics.median(ours[1:]),
    )


def _torch_save(tensors: list[torch.Tensor], path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _folder_in(place: Path | None) -> Iterator[Path]:
    """A folder that goes with all that is in it."""
    folder = Path(tempfile.mkdtemp(prefix="easyckpt-bench-", dir=place))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _quiet(_event: Any) -> None:
    """The bench looks for itself."""


def _size(_ctx: click.Context, _option: click.Parameter, gib: float) -> float:
    if not (math.isfinite(gib) and gib > 0):
        raise click.BadParameter(f"{gib} is no size")
    return gib


def _refuse_if_short(folder: Path, gib: float) -> None:
    """Before the first byte is taken: what runs out of memory in the middle is killed, not told."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        free_gib = shm.free_bytes(fd) / 2**30
    finally:
        os.close(fd)
    if free_gib < TIMES_THE_STATE * gib:
        raise click.ClickException(
            f"{TIMES_THE_STATE * gib:.2f} GiB of memory are needed below {folder.parent}, {free_gib:.2f} are free; nothing was measured."
            " Give a smaller --gib"
        )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--gib",
    default=0.25,
    callback=_size,
    show_default=True,
    help=f"Size of the state. Memory needed: {TIMES_THE_STATE} times that.",
)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--storage",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    help="Also save to a folder here.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")
def main(gib: float, rounds: int, storage: Path | None, *, as_json: bool) -> None:
    """This machine's floor and ours."""
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(_folder_in(shm.SHM if shm.SHM.is_dir() else None))
            written = stack.enter_context(_folder_in(storage)) if storage is not None else None
            _refuse_if_short(folder, gib)
            training = Training(int(gib * 2**30))
            steps = 2 * rounds + 2 + (rounds + 1 if written else 0)
            bar = stack.enter_context(click.progressbar(length=steps, label="measuring", file=sys.stderr))
            lines, opened = copies(training, folder, rounds, lambda: bar.update(1))
            lines.insert(1, overlapped(training, folder, rounds, lines[0].floor_ms, lambda: bar.update(1)))
            if written is not None:
                lines.append(durable(training, folder, written, rounds, lambda: bar.update(1)))
        except (EasyckptError, OSError) as error:
            raise click.ClickException(str(error)) from error
    size = sum(tensor.nbytes for tensor in training.tensors)
    if as_json:
        rows = {line.what: {"floor_ms": line.floor_ms, "ours_ms": line.ours_ms, "ratio": line.ratio} for line in lines}
        click.echo(msgspec.json.encode({"bytes": size, "open_seconds": opened, "lines": rows}).decode())
        return
    click.echo(
        f"{size / 2**30:.2f} GiB in {len(training.tensors)} tensors, one thread, median of {rounds}; memory taken in {opened:.2f} s"
    )
    click.echo(f"{'':52}{'floor, ms':>12}{'ours, ms':>12}{'ratio':>10}")
    for line in lines:
        click.echo(f"{line.what:52}{line.floor_ms:12.2f}{line.ours_ms:12.2f}{line.ratio:10.3f}")


if __name__ == "__main__":
    main()
