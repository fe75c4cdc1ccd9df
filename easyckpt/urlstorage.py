"""Storage behind a URL, through fsspec (oss, s3, gcs, memory, ...). Objects appear whole or not at all when their upload is closed.

The manifest is written last and exclusively where the store can (`mode="create"`), else after a look; its own digest still proves it. fsspec and
the store's driver are installed by who uses them: `pip install fsspec ossfs`.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import importlib
from collections.abc import Iterable, Iterator
from typing import Any

from easyckpt import manifest
from easyckpt.errors import AlreadyFlushed, EasyckptError, StorageError
from easyckpt.manifest import FILE_NAME
from easyckpt.storage import Reader


class UrlStorage:
    """A bucket or path of any fsspec file system."""

    def __init__(self, url: str) -> None:
        try:
            fsspec = importlib.import_module("fsspec")
        except ImportError as error:
            raise EasyckptError(f"storage {url!r} needs fsspec and the store's driver: pip install fsspec") from error
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise EasyckptError(f"storage {url!r} cannot be opened: {error}") from error
        self._url = url

    @property
    def is_private(self) -> bool:
        """Whether this process alone sees what is written: fsspec's memory, also behind a cache or a folder of it."""
        fs = self._fs
        while (inner := getattr(fs, "fs", None)) is not None and inner is not fs:
            fs = inner
        return "memory" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)

    def write_shard(self, folder: str, name: str, pieces: Iterable[memoryview]) -> None:
        with self._told(f"{folder}/{name}"):
            self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            file = self._fs.open(f"{self._root}/{folder}/{name}", "wb")
            try:
                for piece in pieces:
                    file.write(piece)
            except BaseException:
                # An upload that is not closed never becomes an object.
                with contextlib.suppress(AttributeError, NotImplementedError, OSError):
                    file.discard()
                raise
            file.close()

    def commit(self, folder: str, raw: bytes) -> None:
        path = f"{self._root}/{folder}/{FILE_NAME}"
        with self._told(path):
            self._fs.invalidate_cache()
            if self._fs.exists(path):
                raise AlreadyFlushed(f"{path} was committed by another writer; this flush is dropped")
            try:
                self._fs.pipe_file(path, raw, mode="create")
            except FileExistsError as error:
                raise AlreadyFlushed(f"{path} was committed by another writer; this flush is dropped") from error
            except (TypeError, NotImplementedError):
                self._fs.pipe_file(path, raw)

    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        return [
            f"{role}/{name}"
            for role in self._names(self._root)
            for name in self._names(f"{self._root}/{role}")
            if manifest.parse_folder(name)
        ]

    def read_manifest(self, folder: str) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._root}/{folder}/{FILE_NAME}"))
        except FileNotFoundError:
            return None

    def open_shard(self, folder: str, name: str) -> Reader:
        return _ObjectReader(self._fs, f"{self._root}/{folder}/{name}")

    def delete(self, folder: str) -> None:
        path = f"{self._root}/{folder}"
        with self._told(path):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{path}/{FILE_NAME}")
            self._fs.rm(path, recursive=True)

    def age_seconds(self, folder: str, now: float) -> float:
        """0 where the store tells no times: nothing is taken for old then."""
        times = []
        for found in self._fs.ls(f"{self._root}/{folder}", detail=True):
            stamp = found.get("mtime") or found.get("LastModified") or found.get("created")
            seconds = stamp.timestamp() if isinstance(stamp, dt.datetime) else stamp
            times += [float(seconds)] if isinstance(seconds, int | float) else []
        return now - max(times) if times else 0.0

    def create(self, folder: str, name: str, raw: bytes) -> bool:
        path = f"{self._root}/{folder}/{name}"
        with self._told(path):
            self._fs.makedirs(f"{self._root}/{folder}", exist_ok=True)
            self._fs.invalidate_cache()
            if self._fs.exists(path):
                return False
            try:
                self._fs.pipe_file(path, raw, mode="create")
            except FileExistsError:
                return False
            except (TypeError, NotImplementedError):
                self._fs.pipe_file(path, raw)
            return True

    def read_small(self, folder: str, name: str) -> bytes:
        return bytes(self._fs.cat_file(f"{self._root}/{folder}/{name}"))

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            with self._told(f"{folder}/{name}"), contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(f"{self._root}/{folder}/{name}")

    def remove_empty(self, folder: str) -> None:
        """There is none: objects make their folders."""

    def stamps(self, folder: str) -> dict[str, str]:
        self._fs.invalidate_cache()
        try:
            found = self._fs.ls(f"{self._root}/{folder}", detail=True)
        except FileNotFoundError:
            return {}
        return {
            one["name"]
            .rstrip("/")
            .rpartition("/")[2]: f"{one.get('size')} {one.get('mtime') or one.get('LastModified') or ''}"
            for one in found
        }

    def _names(self, path: str) -> list[str]:
        try:
            found = self._fs.ls(path, detail=True)
        except FileNotFoundError:
            return []
        return sorted(one["name"].rstrip("/").rpartition("/")[2] for one in found if one["type"] == "directory")

    @contextlib.contextmanager
    def _told(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"writing {path} to {self._url} failed ({error}). The checkpoints committed before are intact and training goes on"
            ) from error


class _ObjectReader:
    def __init__(self, fs: Any, path: str) -> None:
        self._fs = fs
        self._path = path
        self.nbytes = int(fs.size(path))

    def read_into(self, target: memoryview, at: int) -> None:
        block = self._fs.cat_file(self._path, start=at, end=at + len(target))
        if len(block) != len(target):
            raise StorageError(f"{self._path} ends at {at + len(block)}: it was cut short; another copy is tried")
        target[:] = block

    def close(self) -> None:
        """Ranges are requests of their own: nothing is held open."""
