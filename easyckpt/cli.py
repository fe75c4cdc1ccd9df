"""The `easyckpt` command: look at checkpoints, prove them, compare them, move them to and from other formats, throw old ones away.

Exit codes: 0 fine, 1 something is damaged or differs, 2 usage. Tables for people, --json for one document; data on stdout, talk on stderr.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

if TYPE_CHECKING:
    from easyckpt.sources import Candidate
    from easyckpt.target import Target

EPILOG = "Exit codes: 0 fine, 1 something is damaged or differs, 2 usage."
STEP = click.option("--step", type=int, help="Of this step instead of the newest.")
JSON = click.option("--json", "as_json", is_flag=True, help="One JSON document instead of a table.")


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            # `| head` has what it wants; click itself would end with the code of a failure.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return None


def _tolerance(_ctx: click.Context, _option: click.Parameter, value: float) -> float:
    if not value >= 0:
        raise click.BadParameter(f"{value} is no number from 0 on")
    return value


@click.group(cls=_Group, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Look at checkpoints and segments. TARGET is a storage (folder or URL), one checkpoint in it, a segment folder, or a segment file."""


@cli.command("ls", epilog=EPILOG)
@click.argument("target", type=click.Path())
@JSON
def list_snapshots(target: str, *, as_json: bool) -> None:
    """All whole snapshots, newest first."""
    found = _look(target)
    rows = [
        {
            "lineage": one.lineage, "step": one.step, "role": one.role, "member": one.member, "tier": one.tier,
            "ranks": one.ranks, "bytes": one.nbytes, "saved": _when(one.created_at), "state": one.state_digest,
            "note": "left behind" if one.is_left_behind else "",
        }
        for one in found.candidates
    ]  # fmt: skip
    _print(rows, as_json=as_json, title=f"in {found.kind} {target}")


@cli.command("show", epilog=EPILOG)
@click.argument("target", type=click.Path())
@STEP
@JSON
def show(target: str, step: int | None, *, as_json: bool) -> None:
    """One snapshot: what it says of itself, and every tensor."""
    from easyckpt.target import headers

    found = _look(target)
    every = headers(found, _one(found, step))
    if as_json:
        click.echo(msgspec.json.encode(every).decode())
        return
    first = every[0]
    about = {
        name: getattr(first, name)
        for name in ("member", "role", "ranks", "lineage", "step", "epoch", "chain", "flush", "state_digest", "rewinds")
    }
    for name, value in about.items():
        click.echo(f"{name:14}{value}")
    click.echo(f"{'saved':14}{_when(first.created_at)}")
    rows = [
        {
            "rank": header.rank, "tensor": entry.name, "type": entry.dtype, "shape": list(entry.shape),
            "whole": list(entry.global_shape) if entry.global_shape else "", "bytes": 0 if entry.alias_of else entry.nbytes,
            "digest": f"= {entry.alias_of}" if entry.alias_of else entry.digest,
        }
        for header in every for entry in header.tensors
    ]  # fmt: skip
    _print(rows, as_json=False)


@cli.command("verify", epilog=EPILOG)
@click.argument("target", type=click.Path())
@click.option("--step", type=int, help="Only this step.")
@JSON
def verify(target: str, step: int | None, *, as_json: bool) -> None:
    """Reads every byte of every shard against its digests, and reports manifests that are damaged."""
    from easyckpt.errors import EasyckptError
    from easyckpt.target import look

    _must_be_there(target)
    try:
        found = look(target)
    except (EasyckptError, OSError) as error:
        _print([{"step": "", "member": "", "rank": "", "state": f"BAD: {error}"}], as_json=as_json)
        sys.exit(1)
    rows: list[dict[str, Any]] = []
    if step is not None:
        _one(found, step)
    chosen = [one for one in found.candidates if step is None or one.step == step]
    with _progress(sum(source.nbytes for one in chosen for source in one.sources), "verifying") as advance:
        for one in chosen:
            for source in one.sources:
                rows.append(
                    {"step": one.step, "member": one.member, "rank": source.rank, "state": _prove(found, source)}
                )
                advance(source.nbytes)
    rows += _bad_manifests(found) if step is None else []
    _print(rows, as_json=as_json, title=f"to verify in {target}")
    sys.exit(int(not rows or any(row["state"] != "ok" for row in rows)))


@cli.command("diff", epilog=EPILOG)
@click.argument("a", type=click.Path())
@click.argument("b", type=click.Path())
@click.option("--step-a", type=int, help="Step of A instead of the newest.")
@click.option("--step-b", type=int, help="Step of B instead of the newest.")
@click.option(
    "--tolerance", type=float, callback=_tolerance, default=0.0, help="Greatest difference that counts as none."
)
@JSON
def diff(a: str, b: str, step_a: int | None, step_b: int | None, tolerance: float, *, as_json: bool) -> None:
    """Greatest absolute difference of each tensor of two snapshots, whatever ranks saved them. Exit 1 if any differ."""
    from easyckpt.adapters import compare

    found_a, found_b = _look(a), _look(b)
    one_a, one_b = _one(found_a, step_a), _one(found_b, step_b)
    names = compare.unlike(found_a, one_a, found_b, one_b)
    total = sum(_bytes_below(*side, name) for side in ((found_a, one_a), (found_b, one_b)) for name in names)
    with _progress(total, "comparing") as advance:
        rows = compare.compare(found_a, one_a, found_b, one_b, names, advance)
    rows = [row for row in rows if row["difference"] is None or row["difference"] > tolerance]
    _print(rows, as_json=as_json)
    sys.exit(int(bool(rows)))


@cli.command("export", epilog=EPILOG)
@click.argument("target", type=click.Path())
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--format", "kind", type=click.Choice(["hf", "dcp", "torch"]), required=True)
@click.option("--prefix", default=None, help='Which part of the state; "model" for hf, everything for the others.')
@click.option(
    "--config-from",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Model folder to copy config and tokenizer from (hf).",
)
@STEP
def export(target: str, out: Path, kind: str, prefix: str | None, config_from: Path | None, step: int | None) -> None:
    """Writes one snapshot as a Hugging Face folder, a DCP folder, or a file for torch.load."""
    from easyckpt.adapters import interchange

    with _told():
        if os.path.lexists(out) and (kind == "torch" or not out.is_dir() or any(out.iterdir())):
            raise click.UsageError(f"{out} is there already: name a new place")
    found = _look(target)
    path = prefix if prefix is not None else "model" if kind == "hf" else ""
    one = _one(found, step)
    with _told(), _progress(_bytes_below(found, one, path), "reading") as advance:
        whole = interchange.load_whole(found, one, only=[path] if path else None, advance=advance)
        state = interchange.subtree(whole, path)
        if kind == "hf":
            interchange.export_huggingface(state, out, config_from=config_from)
        elif kind == "dcp":
            interchange.export_dcp(state, out)
        else:
            interchange.export_torch(state, out)
    click.echo(f"step {one.step} of {target} is in {out}", err=True)


@cli.command("import", epilog=EPILOG)
@click.argument("source", type=click.Path(path_type=Path, exists=True))
@click.argument("storage", type=click.Path())
@click.option("--format", "kind", type=click.Choice(["hf", "dcp"]), required=True)
@click.option("--step", type=click.IntRange(0, (1 << 63) - 1), default=0, help="Step to give it.")
@click.option("--role", default="trainer")
@click.option("--member", default="trainer-0")
def import_(source: Path, storage: str, kind: str, step: int, role: str, member: str) -> None:
    """Makes a checkpoint of a Hugging Face or DCP folder."""
    import tempfile

    from easyckpt.adapters import interchange
    from easyckpt.engine import Checkpointer

    files = [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]
    read = interchange.import_huggingface if kind == "hf" else interchange.import_dcp
    with _told(), tempfile.TemporaryDirectory(dir=_beside(storage)) as folder:
        with _progress(sum(file.stat().st_size for file in files), "reading") as advance:
            state = read(source, advance)
        try:
            engine = Checkpointer(
                storage, folder=folder, role=role, member=member, mode="copy", slots=1, keep=1_000_000
            )
        except ValueError as error:
            raise click.UsageError(str(error)) from error
        engine.save(step, state)
        engine.close()
    click.echo(f"{source} is step {step} of {storage}", err=True)


@cli.command("gc", epilog=EPILOG)
@click.argument("target", type=click.Path())
@click.option(
    "--keep", type=click.IntRange(1), default=3, show_default=True, help="Newest checkpoints to keep (storage)."
)
@click.option("--keep-every", type=click.IntRange(1), help="Keep multiples of this step as well (storage).")
@click.option(
    "--sealed", is_flag=True, help="Remove sealed segments too, if no living process writes or pins them (memory)."
)
def gc(target: str, keep: int, keep_every: int | None, *, sealed: bool) -> None:
    """Removes old checkpoints and dead flushes from a storage, or what nobody can use from a segment folder."""
    from easyckpt import flush, shm

    found = _look(target)
    with _told():
        if found.kind == "memory":
            removed = [str(path) for path in shm.reclaim(target, keep_sealed=not sealed)]
        elif found.kind == "storage":
            roles = sorted({one.role for one in found.candidates})
            removed = [
                name
                for role in roles
                for name in flush.tidy(
                    target, role=role, keep=keep, keep_every=keep_every, keep_abandoned=False, now=time.time()
                )
            ]
        else:
            raise click.UsageError(f"{target} is one {found.kind}: name its storage or segment folder")
    for name in removed:
        click.echo(name)
    click.echo(f"{len(removed)} removed", err=True)


# --------------------------------------------------------------------------------------------------------------- inside


def _must_be_there(target: str) -> None:
    if "://" not in target and not os.path.lexists(target):
        raise click.UsageError(f"{target!r} is not there")


def _look(target: str) -> Target:
    from easyckpt.target import look

    _must_be_there(target)
    with _told():
        return look(target)


def _one(found: Target, step: int | None) -> Candidate:
    if step is not None and all(one.step != step for one in found.candidates):
        have = ", ".join(str(one.step) for one in found.candidates[:8])
        raise click.UsageError(f"no snapshot of step {step} is there" + (f"; there are {have}" if have else ""))
    with _told():
        return found.one(step)


def _beside(storage: str) -> Path | None:
    """Where a segment as large as the checkpoint may lie for a while: on the storage's own disk, if it has one here."""
    return None if "://" in storage else next(one for one in Path(storage).absolute().parents if one.is_dir())


def _bytes_below(found: Target, candidate: Candidate, path: str) -> int:
    """Of the tensors in one part of a snapshot."""
    from easyckpt.target import headers

    entries = (entry for header in headers(found, candidate) for entry in header.tensors if not entry.alias_of)
    return sum(entry.nbytes for entry in entries if not path or f"{entry.name}/".startswith(f"{path}/"))


def _prove(found: Target, source: Any) -> str:
    from easyckpt import shm
    from easyckpt.errors import EasyckptError
    from easyckpt.flush import verify_shard

    try:
        if source.segment is not None:
            shm.verify(source.segment.path)
        elif found.storage is not None:
            verify_shard(found.storage, source.record, source.shard)
    except (EasyckptError, OSError) as error:
        return f"BAD: {error}"
    return "ok"


def _bad_manifests(found: Target) -> list[dict[str, Any]]:
    from easyckpt.storage import read_manifests

    if found.kind != "storage" or found.storage is None:
        return []
    return [
        {"step": folder, "member": "", "rank": "", "state": f"BAD: {read}"}
        for folder, read in read_manifests(found.storage)
        if isinstance(read, Exception)
    ]


class _told:  # noqa: N801 - reads as a word in a with statement
    """Our errors as one line and exit 1."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        from easyckpt.errors import EasyckptError

        if isinstance(error, EasyckptError | OSError) and not isinstance(error, BrokenPipeError):
            click.echo(f"easyckpt: {error}", err=True)
            sys.exit(1)


class _progress:  # noqa: N801 - reads as a word in a with statement
    """A bar on stderr where that is a terminal, nothing elsewhere."""

    def __init__(self, total: int, what: str) -> None:
        self._total, self._what = total, what
        self._bar: Any = None

    def __enter__(self) -> Any:
        if not sys.stderr.isatty():
            return lambda _amount: None
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = TextColumn(self._what), BarColumn(), DownloadColumn(), TransferSpeedColumn()
        bar: Any = Progress(*columns, console=Console(stderr=True))
        self._bar = bar
        bar.start()
        task = bar.add_task(self._what, total=self._total)
        return lambda amount: bar.advance(task, amount)

    def __exit__(self, *_error: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _print(rows: list[dict[str, Any]], *, as_json: bool, title: str = "") -> None:
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        click.echo(f"nothing {title}".strip(), err=True)
        return
    names = list(rows[0])
    cells = [[str(row[name]) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[index]) for line in cells)) for index, name in enumerate(names)]
    for line in [names, *cells]:
        click.echo("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def main() -> None:
    cli.main(prog_name="easyckpt")


if __name__ == "__main__":
    main()
