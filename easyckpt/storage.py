"""Where checkpoints become durable: a folder (disk, NFS, object-store mount). No torch, no numpy.

Data first, marker last: a shard is written under a hidden name, fsynced and renamed; the manifest appears whole, once, by an exclusive link.
Deleting goes the other way round: the manifest first. Writes are O_DIRECT from the aligned segment where the file system takes it, buffered
where not. Errors of the system become StorageFull, StorageDenied or StorageError; what was committed before is never touched by a failure.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from easyckpt import digest, layout, manifest
from easyckpt.errors import AlreadyFlushed, Corrupt, EasyckptError, StorageDenied, StorageError, StorageFull
from easyckpt.layout import PAGE_BYTES, SegmentHeader
from easyckpt.manifest import FILE_NAME, Manifest, Shard

PART_SUFFIX = ".part"
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe under the name of a file holds nobody up


class Reader(Protocol):
    """An open shard."""

    nbytes: int

    def read_into(self, target: memoryview, at: int) -> None:
        """Fills `target` with the bytes from `at` on."""

    def close(self) -> None: ...


class Storage(Protocol):
    """Few verbs. A folder of a checkpoint is named ROLE/lLLL-sSSSSSSSSS-eEEE; names are relative to the storage."""

    def write_shard(self, folder: str, name: str, pieces: Iterable[memoryview]) -> None:
        """Makes one file durable. The pieces may be reused as soon as the next one is asked for."""

    def commit(self, folder: str, raw: bytes) -> None:
        """Publishes the manifest, exclusively and last. Raises AlreadyFlushed."""

    def folders(self) -> list[str]:
        """All folders that look like checkpoints, committed or not. Raises StorageError where that cannot be told."""

    def read_manifest(self, folder: str) -> bytes | None:
        """None when the folder was never committed."""

    def open_shard(self, folder: str, name: str) -> Reader: ...

    def delete(self, folder: str) -> None:
        """Removes a checkpoint, its manifest first."""

    def age_seconds(self, folder: str, now: float) -> float:
        """Since something was last written into the folder."""

    def create(self, folder: str, name: str, raw: bytes) -> bool:
        """Makes a small file, exclusively; False where it is there already."""

    def read_small(self, folder: str, name: str) -> bytes:
        """Raises FileNotFoundError."""

    def remove(self, folder: str, names: Iterable[str]) -> None:
        """Removes files; one that is gone already is no error."""

    def remove_empty(self, folder: str) -> None:
        """Removes a folder with nothing in it."""

    def stamps(self, folder: str) -> dict[str, str]:
        """What lies in a folder, each file with a mark that changes when it is written to; nothing where there is no folder."""


def open_storage(where: str | os.PathLike[str] | Storage) -> Storage:
    """A storage by its path."""
    if isinstance(where, str | os.PathLike):
        text = os.fspath(where)
        if "://" in text and not text.startswith("file://"):
            from easyckpt.urlstorage import UrlStorage

            return UrlStorage(text)
        return FolderStorage(Path(text.removeprefix("file://")))
    return where


def open_shared(where: str | os.PathLike[str] | Storage) -> Storage:
    """One that other processes see as well: helpers and agents flush to it. Raises EasyckptError for one that lives in this process only."""
    storage = open_storage(where)
    if getattr(storage, "is_private", False):
        raise EasyckptError(
            f"storage {where!r} lives in this process's memory: what a helper flushes there is lost. Name a folder or an object store"
        )
    return storage


class Files:
    """The system calls under a FolderStorage, one place to watch or to break."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def write(self, fd: int, block: memoryview, at: int) -> int:
        return os.pwrite(fd, block, at)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        os.rename(source, target)

    def link(self, source: Path, target: Path) -> None:
        os.link(source, target)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def make_folder(self, path: Path) -> None:
        os.mkdir(path)

    def remove_folder(self, path: Path) -> None:
        os.rmdir(path)


class FolderStorage:
    """A folder, made when first written to; existing parents keep their modes, new files follow the umask."""

    def __init__(self, root: Path, files: Files | None = None) -> None:
        self.root = root
        self._files = files or Files()
        self._mount = _mount_of(root)

    def write_shard(self, folder: str, name: str, pieces: Iterable[memoryview]) -> None:
        target = self.root / folder / name
        # A name of its own: on shared storage two hosts may well write under one pid.
        part = target.with_name(f".{name}.{secrets.token_hex(4)}{PART_SUFFIX}")
        with told(target):
            self._make_folders(target.parent)
            try:
                self._write(part, pieces)
                self._files.rename(part, target)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._files.unlink(part)
                raise

    def commit(self, folder: str, raw: bytes) -> None:
        target = self.root / folder / FILE_NAME
        part = target.with_name(f".{FILE_NAME}.{secrets.token_hex(4)}{PART_SUFFIX}")
        self._must_be_mounted()
        with told(target):
            self._sync_folder(target.parent)
            try:
                self._write(part, [memoryview(raw)])
                self._publish(part, target, raw)
            except FileExistsError as error:
                raise AlreadyFlushed(f"{target} was committed by another writer; this flush is dropped") from error
            finally:
                with contextlib.suppress(OSError):
                    self._files.unlink(part)
            for level in (target.parent, target.parent.parent, self.root):
                self._sync_folder(level)

    def folders(self) -> list[str]:
        found = []
        try:
            for role in _subfolders(self.root):
                found += [f"{role}/{name}" for name in _subfolders(self.root / role) if manifest.parse_folder(name)]
        except OSError as error:
            raise StorageError(
                f"the checkpoints in {self.root} cannot be listed ({error.strerror}), so what is newest is not known."
                " Nothing was changed; mend the storage, or name another"
            ) from error
        return found

    def read_manifest(self, folder: str) -> bytes | None:
        try:
            return self.read_small(folder, FILE_NAME)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def open_shard(self, folder: str, name: str) -> Reader:
        return FileReader(self.root / folder / name)

    def delete(self, folder: str) -> None:
        path = self.root / folder
        with told(path):
            for name in (FILE_NAME, *os.listdir(path)):
                with contextlib.suppress(FileNotFoundError):
                    self._files.unlink(path / name)
                if name == FILE_NAME:
                    self._sync_folder(path)
            self._files.remove_folder(path)

    def age_seconds(self, folder: str, now: float) -> float:
        path = self.root / folder
        times = [path.stat().st_mtime, *(entry.stat().st_mtime for entry in os.scandir(path))]
        return now - max(times)

    def create(self, folder: str, name: str, raw: bytes) -> bool:
        target = self.root / folder / name
        with told(target):
            self._make_folders(target.parent)
            try:
                fd = self._files.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                return False
            try:
                if raw:
                    self._files.write(fd, memoryview(raw), 0)
            except OSError:
                self._files.unlink(target)
                raise
            finally:
                os.close(fd)
            return True

    def read_small(self, folder: str, name: str) -> bytes:
        path = self.root / folder / name
        if path.exists() and not path.is_file():
            return b""  # a folder or a pipe under that name says nothing, and so is damaged
        return path.read_bytes()

    def remove(self, folder: str, names: Iterable[str]) -> None:
        for name in names:
            with told(self.root / folder / name), contextlib.suppress(FileNotFoundError):
                self._files.unlink(self.root / folder / name)

    def remove_empty(self, folder: str) -> None:
        with contextlib.suppress(OSError):  # one with something in it stays
            self._files.remove_folder(self.root / folder)

    def stamps(self, folder: str) -> dict[str, str]:
        found = {}
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in os.scandir(self.root / folder):
                with contextlib.suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    found[entry.name] = f"{status.st_size} {status.st_mtime_ns}"
        return found

    def _must_be_mounted(self) -> None:
        """What is written under a mount that has gone fills another disk, and is hidden when the mount comes back."""
        if not os.path.ismount(self._mount):
            raise StorageError(
                f"{self._mount}, where {self.root} was when it was opened, is not mounted any more or does not answer; nothing was written."
                " Mount it again: what is newest stays in memory until then"
            )

    def _make_folders(self, path: Path) -> None:
        """Each that is missing, and its name in the one above it made durable."""
        self._must_be_mounted()
        missing = [folder for folder in (path, *path.parents) if not folder.exists()]
        for folder in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another rank's or writer's
                self._files.make_folder(folder)
            with contextlib.suppress(PermissionError):  # one that may be entered but not read
                self._sync_folder(folder.parent)

    def _publish(self, part: Path, target: Path, raw: bytes) -> None:
        """The manifest appears whole or not at all; where the file system has no links, it is written in place, with its digest as proof."""
        try:
            self._files.link(part, target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            fd = self._files.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            self._write_all(fd, [memoryview(raw)])

    def _write(self, path: Path, pieces: Iterable[memoryview]) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        try:
            fd = self._files.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            fd = self._files.open(path, flags)
        self._write_all(fd, pieces)

    def _write_all(self, fd: int, pieces: Iterable[memoryview]) -> None:
        try:
            at = 0
            for piece in pieces:
                done = 0
                while done < len(piece):
                    done += self._write_some(fd, piece[done:], at + done)
                at += done
            self._files.fsync(fd)
        finally:
            os.close(fd)

    def _write_some(self, fd: int, block: memoryview, at: int) -> int:
        """One write; direct while everything is aligned, buffered from the first block on that is not, or that is refused."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        if flags & os.O_DIRECT:
            aligned = len(block) // PAGE_BYTES * PAGE_BYTES
            try:
                if aligned and at % PAGE_BYTES == 0 and (written := self._files.write(fd, block[:aligned], at)):
                    return written
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        written = self._files.write(fd, block, at)
        if written == 0:
            raise OSError(errno.EIO, "the file system took no bytes")
        return written

    def _sync_folder(self, path: Path) -> None:
        fd = self._files.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._files.fsync(fd)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EBADF):  # some network file systems sync no folders
                raise
        finally:
            os.close(fd)


class FileReader:
    """A shard as a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, _READ)
        self.nbytes = os.fstat(self._fd).st_size

    def read_into(self, target: memoryview, at: int) -> None:
        done = 0
        while done < len(target):
            # One call moves at most 0x7ffff000 bytes.
            count = os.preadv(self._fd, [target[done : done + (1 << 30)]], at + done)
            if count == 0:
                raise StorageError(f"{self.path} ends at {at + done}: it was cut short; another copy is tried")
            done += count

    def close(self) -> None:
        os.close(self._fd)


def list_manifests(storage: str | os.PathLike[str] | Storage, role: str | None = None) -> list[Manifest]:
    """Every committed checkpoint whose manifest is intact, newest first."""
    found = (read for folder, read in read_manifests(open_storage(storage)) if isinstance(read, Manifest))
    chosen = [read for read in found if role is None or read.role == role]
    return sorted(chosen, key=lambda read: (read.version, read.epoch), reverse=True)


def read_manifests(storage: Storage) -> Iterator[tuple[str, Manifest | EasyckptError | None]]:
    """Each checkpoint folder with its manifest, with what is wrong with it, or with None where none was committed."""
    for folder in storage.folders():
        raw = storage.read_manifest(folder)
        if raw is None:
            yield folder, None
            continue
        try:
            yield folder, manifest.decode(raw, where=f"{folder}/{FILE_NAME}")
        except EasyckptError as error:
            yield folder, error


def shard_header(reader: Reader, shard: Shard, where: str) -> SegmentHeader:
    """The header of a shard, proven by the manifest. Raises Corrupt."""
    if reader.nbytes != shard.nbytes or not 8 <= shard.prefix_bytes <= shard.nbytes:
        raise Corrupt(f"{where} has {reader.nbytes} bytes, its manifest says {shard.nbytes}; another copy is tried")
    prefix = bytearray(shard.prefix_bytes)
    reader.read_into(memoryview(prefix), 0)
    if digest.digest_bytes(prefix) != shard.prefix_digest:
        raise Corrupt(f"{where}: the header does not match the manifest's digest; another copy is tried")
    header = layout.decode(prefix, where=where)
    if shard.prefix_bytes + header.data_bytes != shard.nbytes or header.state_digest != shard.state_digest:
        raise Corrupt(f"{where}: header and manifest do not belong together; another copy is tried")
    return header


@contextlib.contextmanager
def told(path: Path) -> Iterator[None]:
    """System errors as ours: what happened, what is intact, what to do."""
    try:
        yield
    except OSError as error:
        intact = "The checkpoints committed before are intact and training goes on."
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(
                f"no space left for {path} ({error.strerror}). {intact} Free some, or lower keep="
            ) from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise StorageDenied(
                f"{path} may not be written ({error.strerror}). {intact} Mend its rights or mount"
            ) from error
        raise StorageError(f"writing {path} failed ({error.strerror}). {intact}") from error


def _mount_of(root: Path) -> Path:
    """The mount that a folder lies in, or will be made in."""
    real = Path(os.path.realpath(root))
    return next(folder for folder in (real, *real.parents) if os.path.ismount(folder))


def _subfolders(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False))
    except (FileNotFoundError, NotADirectoryError):
        return []
