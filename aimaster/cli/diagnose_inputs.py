"""Opens what a person gives to `aimaster diagnose`: files, folders, archives, compressed files, standard input.

Every log is handed on as a name and a stream of chunks, read once and never wholly in memory; a folder that still grows is read up to the sizes
found at the start. Which node a log belongs to is settled afterwards from all names together (`name_nodes`).
"""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import itertools
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, cast

from aimaster.catalogue.scan import CHUNK_BYTES

SKIPPED_SUFFIXES: Final = frozenset(
    f".{suffix}"
    for suffix in [
        "safetensors",
        "pt",
        "pth",
        "bin",
        "npy",
        "npz",
        "so",
        "pyc",
        "py",
        "ipynb",
        "c",
        "h",
        "cu",
        "cpp",
        "md",
        "png",
        "jpg",
        "jpeg",
        "gif",
        "pdf",
        "parquet",
        "arrow",
        "whl",
        "db",
        "sqlite",
        "pkl",
        "distcp",
        "svg",
        "html",
        "css",
        "js",
        "onnx",
        "gguf",
        "mp4",
        "wav",
        "trace",
        "core",
    ]
)
_MAGIC: Final = (
    (b"\x1f\x8b", ".gz"),
    (b"\x28\xb5\x2f\xfd", ".zst"),
    (b"BZh", ".bz2"),
    (b"\xfd7zXZ\x00", ".xz"),
    (b"PK\x03\x04", ".zip"),
)
"""What packed files begin with, for a stream that has no name."""
SAMPLE_BYTES: Final = 4096
_CONTROLS: Final = bytes(byte for byte in range(32) if byte not in b"\t\n\r\x1b\b\f") + bytes(range(127, 192))
"""Rare in text: control characters, and bytes that only continue a character."""
_STAGES: Final = (".gz", ".bz2", ".xz", ".zst", ".zstd")


class Source(NamedTuple):
    """One log: where it was given, its name below that place, and its bytes."""

    root: str
    """The path the user gave."""
    name: str
    """Relative to it; empty for a file given itself."""
    chunks: Iterator[bytes]
    size: int = 0
    """Bytes of a plain file; 0 for everything that cannot be read twice."""


class Unreadable(NamedTuple):
    """Something that could not be read, and why."""

    name: str
    why: str


def open_sources(paths: Iterable[str], stdin: IO[bytes], problems: list[Unreadable]) -> Iterator[Source]:
    """All logs of the given paths, one after the other; what cannot be read is noted in `problems`."""
    for text in paths:
        if text == "-":
            yield from _stdin(stdin, problems)
            continue
        path = Path(text)
        try:
            if path.is_dir():
                yield from _folder(text, path, problems)
            else:
                yield from _file(text, path, "", problems)
        except OSError as error:
            problems.append(Unreadable(text, error.strerror or str(error)))


class _Peeked(io.RawIOBase):
    """A stream of which the first bytes were looked at."""

    def __init__(self, head: bytes, rest: IO[bytes]) -> None:
        self._head, self._rest = head, rest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._head[: len(buffer)] or self._rest.read(len(buffer))
        self._head = self._head[len(buffer) :]
        buffer[: len(data)] = data
        return len(data)


def _stdin(stream: IO[bytes], problems: list[Unreadable]) -> Iterator[Source]:
    """Standard input: a log, or a packed one, or an archive; a zip is put aside in a file, for its table stands at its end."""
    head = stream.read(512)
    peeked: IO[bytes] = cast("IO[bytes]", io.BufferedReader(_Peeked(head, stream)))
    kind = next((suffix for magic, suffix in _MAGIC if head.startswith(magic)), "")
    if kind == ".zip":
        with tempfile.NamedTemporaryFile(suffix=kind) as aside:
            shutil.copyfileobj(peeked, aside, CHUNK_BYTES)
            aside.flush()
            yield from _zip("-", Path(aside.name), "", problems)
        return
    start, inside = head, peeked
    if kind:
        unpacked, _ = _unpack(peeked, f"-{kind}")
        start = unpacked.read(512)
        inside = cast("IO[bytes]", io.BufferedReader(_Peeked(start, unpacked)))
    if start[257:262] == b"ustar":
        yield from _tar("-", inside, "-", "", problems)
    else:
        yield Source("-", "", _read(inside))


def _folder(root: str, folder: Path, problems: list[Unreadable]) -> Iterator[Source]:
    seen: set[tuple[int, int]] = set()
    left_out = 0
    for where, folders, files in os.walk(folder, followlinks=True):
        here = os.stat(where)
        if (here.st_dev, here.st_ino) in seen:
            folders.clear()  # Ray's session_latest is a link to its neighbour
            continue
        seen.add((here.st_dev, here.st_ino))
        folders.sort()
        for name in sorted(files):
            path = Path(where, name)
            relative = str(path.relative_to(folder))
            try:
                status = path.stat()
                if not path.is_file() or (status.st_dev, status.st_ino) in seen:
                    continue
                if _skipped(name):
                    left_out += not name.startswith(".")
                    continue
                if path.is_symlink():
                    seen.add((status.st_dev, status.st_ino))
                yield from _file(root, path, relative, problems)
            except OSError as error:
                problems.append(Unreadable(relative, error.strerror or str(error)))
    if left_out:
        problems.append(
            Unreadable(f"{left_out} file{'s' if left_out > 1 else ''} of {root}", "by their names they are no logs")
        )


def _skipped(name: str) -> bool:
    return Path(name).suffix.lower() in SKIPPED_SUFFIXES or name.startswith(".")


def _file(root: str, path: Path, relative: str, problems: list[Unreadable]) -> Iterator[Source]:
    with path.open("rb", buffering=0) as raw:
        head = raw.read(512)
        raw.seek(0)
        name = path.name.lower()
        if head[:4] == b"PK\x03\x04":
            yield from _zip(root, path, relative, problems)
            return
        kind = _tar_kind(name, head)
        if kind:
            yield from _tar(root, raw, path.name, relative, problems)
            return
        size = os.fstat(raw.fileno()).st_size if path.is_file() else None
        stream, _ = _unpack(raw, path.name)
        plain = stream is raw and size is not None
        yield Source(root, relative, _read(stream, size if plain else None), (size or 0) if plain else 0)


def _tar_kind(name: str, head: bytes) -> bool:
    return (
        re.search(r"\.(?:tar(?:\.(?:gz|bz2|xz|zst|zstd))?|tgz|tbz2|txz)$", name) is not None
        or head[257:262] == b"ustar"
    )


def _tar(root: str, raw: IO[bytes], file_name: str, relative: str, problems: list[Unreadable]) -> Iterator[Source]:
    stream: IO[bytes] = raw
    if file_name.endswith((".zst", ".zstd")):
        stream, _ = _unpack(raw, file_name)
        mode = "r|"
    else:
        mode = "r|*"
    try:
        with tarfile.open(fileobj=stream, mode=mode) as archive:  # type: ignore[call-overload]
            for member in archive:
                if not member.isfile() or _skipped(Path(member.name).name):
                    continue
                content = archive.extractfile(member)
                if content is not None:
                    inner, _ = _unpack(content, member.name)
                    yield Source(root, str(Path(relative, _inside(member.name))), _read(inner))
    except (tarfile.TarError, EOFError, OSError) as error:
        problems.append(Unreadable(relative or file_name, f"the archive ends early or is damaged: {error}"))


def _zip(root: str, path: Path, relative: str, problems: list[Unreadable]) -> Iterator[Source]:
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                if member.is_dir() or _skipped(Path(member.filename).name):
                    continue
                with archive.open(member) as content:
                    inner, _ = _unpack(content, member.filename)
                    yield Source(root, str(Path(relative, _inside(member.filename))), _read(inner))
    except (zipfile.BadZipFile, EOFError, OSError, RuntimeError) as error:
        problems.append(Unreadable(relative or path.name, f"the archive is damaged or locked: {error}"))


def _inside(name: str) -> str:
    """A member's name without leading slashes and dots: it is only shown, never written."""
    return "/".join(part for part in name.split("/") if part not in ("", ".", ".."))


def _unpack(raw: IO[bytes], name: str) -> tuple[IO[bytes], str]:
    suffix = Path(name.lower()).suffix
    if suffix not in _STAGES and suffix != ".tgz":
        return raw, name
    bare = name[: -len(suffix)]
    if suffix in (".gz", ".tgz"):
        return cast("IO[bytes]", gzip.GzipFile(fileobj=raw)), bare
    if suffix == ".bz2":
        return cast("IO[bytes]", bz2.BZ2File(raw)), bare
    if suffix == ".xz":
        return cast("IO[bytes]", lzma.LZMAFile(raw)), bare
    return _zstd(raw), bare


def _zstd(stream: IO[bytes]) -> IO[bytes]:
    try:
        import zstandard
    except ImportError:
        try:
            child = subprocess.Popen(["zstd", "-dcq"], stdin=stream, stdout=subprocess.PIPE)
        except (FileNotFoundError, OSError) as error:
            raise OSError("to read .zst, install the Python package zstandard or the program zstd") from error
        if child.stdout is None:
            raise OSError("zstd gave no output") from None
        return child.stdout
    return zstandard.ZstdDecompressor().stream_reader(stream)  # type: ignore[no-any-return,unused-ignore]


class NotTextError(Exception):
    """No log: its bytes are no text."""


def as_text_bytes(first: bytes, rest: Iterator[bytes], name: str) -> Iterator[bytes]:
    """A log's bytes as the scan wants them: UTF-16 as UTF-8, without a byte order mark, and without the NULs that a crash or a truncation
    leaves in place of what was not written.
    """
    if first.startswith((b"\xff\xfe", b"\xfe\xff")):
        decoder = codecs.getincrementaldecoder("utf-16")(errors="replace")
        for chunk in itertools.chain((first,), rest):
            yield decoder.decode(chunk).encode()
        return
    first = first.removeprefix(codecs.BOM_UTF8)
    sample = first.replace(b"\0", b"")[:SAMPLE_BYTES]
    if b"\0" in first and len(sample.translate(None, _CONTROLS)) < 0.9 * len(sample):
        raise NotTextError(name)
    for chunk in itertools.chain((first,), rest):
        yield chunk.replace(b"\0", b"") if b"\0" in chunk else chunk


def _read(stream: IO[bytes], most: int | None = None) -> Iterator[bytes]:
    left = most
    while left is None or left > 0:
        data = stream.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        if not data:
            return
        if left is not None:
            left -= len(data)
        yield data


def line_number(path: str, offset: int) -> int:
    """The number of the line that begins at an offset of a plain file."""
    count = 0
    with open(path, "rb", buffering=0) as file:
        left = offset
        while left > 0 and (data := file.read(min(CHUNK_BYTES, left))):
            count += data.count(b"\n")
            left -= len(data)
    return count + 1


# -------------------------------------------------------------------------------------------------- which node is it

_GENERIC = re.compile(
    r"^(?:logs?|old|var|tmp|ray|output|outputs?|out|runs?|attempt[_-]?\d+|session_[\w-]+|none_\w+|events?|export_events|\d{1,3}|stdout|stderr|members?|nodes?|"
    r"checkpoints?|wandb|tensorboard|tb|kernel|journal|messages)$"
)
_NODE_IN_FILE = re.compile(
    r"(?:^|[._-])(?P<node>(?:(?:node|host|worker|pod|gpu|master|head|policy|rollout|controller|trainer|ip|dlc|rank-node)[_-]?[\w-]*\d|head|controller)"
    r"|\d+\.\d+\.\d+\.\d+)(?=[._-](?:\w+[._-])*(?:log|out|err|txt|jsonl?|stderr|stdout)\b|$)"
)
_HOST_LIKE = re.compile(
    r"(?:node|host|worker|gpu|master|head|policy|rollout|controller|pod|ip-)[\w.-]*|\d+\.\d+\.\d+\.\d+", re.IGNORECASE
)


def name_nodes(names: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str | None]:
    """The node of each log, from the places all of them lie in."""
    names = list(names)
    roots = {root for root, _ in names}
    found: dict[tuple[str, str], str | None] = {}
    for root in roots:
        inside = [name for at, name in names if at == root]
        shared = _shared_folder(root, inside)
        for name in inside:
            found[(root, name)] = _node_of(root, name.removeprefix(shared), several=len(roots) > 1, files=inside)
    return found


def _shared_folder(root: str, names: list[str]) -> str:
    """The one folder that an archive was packed with, which is no node."""
    if root != "-" and not re.search(r"\.(?:tar|tgz|tbz2|txz|zip)", root.lower()):
        return ""
    firsts = {name.split("/", 1)[0] for name in names}
    if len(firsts) == 1 and all(name.count("/") >= 2 for name in names):
        return next(iter(firsts)) + "/"
    return ""


def _node_of(root: str, name: str, *, several: bool, files: list[str]) -> str | None:
    folders = name.split("/")[:-1]
    for folder in folders:
        if not _GENERIC.match(folder):
            return folder
    if not folders or all(_GENERIC.match(folder) for folder in folders):
        base = Path(root.rstrip("/")).name if root != "-" else ""
        stem = Path(name or base).name
        hint = _NODE_IN_FILE.search(stem)
        if hint and (len(files) > 1 or several or not name):
            return hint["node"]
        if name and (several or _HOST_LIKE.fullmatch(base)) and not _GENERIC.match(base):
            return base
        if any(Path(other).name.startswith("gcs_server.") for other in files) or stem.startswith("gcs_server."):
            return "head"
    return None
