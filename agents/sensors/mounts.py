"""Room, inodes and read-only state of the file systems that a run lives on; a network file system is asked by a helper that is killed.

host.room     a folder of the run: room, inodes, read-only; `unreadable` where it is not there, `bad` where its server does not answer
host.mount    a local disk of the machine, by mount point's device: room, inodes, read-only
host.remote   any other network file system of the machine: whether its server answers

statvfs of a dead NFS server never returns and cannot be interrupted: there `stat -f` is run as a process of its own, with a deadline.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from aimaster.wire.health import Reading, ReadingState, Scalar, Subject

REMOTE: Final = frozenset({"nfs", "nfs4", "cifs", "smb3", "lustre", "ceph", "glusterfs", "beegfs", "gpfs", "9p", "afs"})
DISKS: Final = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs"})
MOST_DISKS: Final = 32
MOST_REMOTES: Final = 16
REMOTE_EVERY: Final = 6
"""The run's own folders are asked at each reading, the machine's other file servers at each so-manieth."""
NO_SERVER: Final = frozenset({"fuse.lxcfs", "fuse.portal", "fuse.gvfsd-fuse", "fusectl"})
STAT: Final = ("stat", "-f", "-c", "%S %b %a %c %d")
"""Block size, blocks, blocks free to users, inodes, inodes free."""


class Mount:
    """One line of /proc/self/mountinfo."""

    def __init__(self, point: str, kind: str, device: str, *, read_only: bool) -> None:
        self.point, self.kind, self.device, self.read_only = point, kind, device, read_only

    @property
    def remote(self) -> bool:
        return self.kind in REMOTE or self.kind.startswith("fuse")


class MountSensor:
    """The folders of the run, and the machine's disks."""

    name = "mounts"

    def __init__(
        self,
        node: str,
        folders: Mapping[str, Path],
        *,
        interval_seconds: float = 5.0,
        limit_seconds: float = 10.0,
        mountinfo: str = "/proc/self/mountinfo",
        stat: tuple[str, ...] = STAT,
    ) -> None:
        self.interval_seconds = interval_seconds
        self._node = node
        self._folders = {name: os.path.abspath(folder) for name, folder in folders.items()}
        self._limit_seconds = limit_seconds
        self._mountinfo = mountinfo
        self._stat = stat
        self._asked: dict[str, tuple[subprocess.Popen[str], float]] = {}
        self._answers: dict[str, Reading] = {}
        self._stuck: list[subprocess.Popen[str]] = []
        self._readings = 0

    def supported(self) -> str:
        return "" if os.access(self._mountinfo, os.R_OK) else f"{self._mountinfo} cannot be read"

    def read(self, now: float) -> list[Reading]:
        mounts = read_mounts(self._mountinfo)
        readings = []
        for name, folder in self._folders.items():
            mount = mount_of(folder, mounts)
            if mount is not None and mount.remote:
                readings.append(self._ask_remote(now, name, folder, mount))
            else:
                readings.append(self._room(now, name, folder, mount))
        readings += self._others(now, mounts)
        disks = {mount.device: mount for mount in reversed(mounts) if mount.kind in DISKS}
        for device, mount in sorted(disks.items())[:MOST_DISKS]:
            readings.append(self._disk(now, device, mount))
        return readings

    def _others(self, now: float, mounts: list[Mount]) -> list[Reading]:
        """The servers of the machine's other network mounts."""
        own = {mount.point for folder in self._folders.values() if (mount := mount_of(folder, mounts)) is not None}
        others = {one.point: one for one in mounts if one.remote and one.point not in own and one.kind not in NO_SERVER}
        asks = self._readings % REMOTE_EVERY == 0
        self._readings += 1
        return [
            self._ask_remote(now, point, point, mount, kind="host.remote", asks=asks)
            for point, mount in sorted(others.items())[:MOST_REMOTES]
        ]

    def close(self) -> None:
        for process, _ in self._asked.values():
            _end(process)

    def _reading(self, now: float, kind: str, values: dict[str, Scalar], state: ReadingState = "ok") -> Reading:
        return Reading(
            sensor=self.name, kind=kind, node=self._node, time_seconds=now,
            state=state, subject=Subject(node=self._node), values=values,
        )  # fmt: skip

    def _room(self, now: float, name: str, folder: str, mount: Mount | None) -> Reading:
        try:
            found = os.statvfs(folder)
        except OSError as error:
            values: dict[str, Scalar] = {"folder": name, "error": error.strerror or str(error)}
            return self._reading(now, "host.room", values, "unreadable")
        read_only = bool(found.f_flag & os.ST_RDONLY)
        values = _values(found.f_frsize, found.f_blocks, found.f_bavail, found.f_files, found.f_favail)
        kind = mount.kind if mount is not None else ""
        return self._reading(now, "host.room", {"folder": name, "filesystem": kind, "read_only": read_only, **values})

    def _disk(self, now: float, device: str, mount: Mount) -> Reading:
        values: dict[str, Scalar] = {"device": os.path.basename(device), "read_only": mount.read_only}
        with contextlib.suppress(OSError):  # a mount point that is not ours to see
            found = os.statvfs(mount.point)
            values |= _values(found.f_frsize, found.f_blocks, found.f_bavail, found.f_files, found.f_favail)
        return self._reading(now, "host.mount", values)

    def _ask_remote(
        self, now: float, name: str, folder: str, mount: Mount, *, kind: str = "host.room", asks: bool = True
    ) -> Reading:
        """What the last helper said; begins another one. While one is out, its predecessor's answer stands until the deadline."""
        known = self._answers.get(name)
        asked = self._asked.get(name)
        if asked is not None:
            process, since = asked
            if process.poll() is not None:
                del self._asked[name]
                known = self._answers[name] = self._answer(now, kind, name, mount, process)
            elif time.monotonic() - since > self._limit_seconds:
                del self._asked[name]
                if not _end(process):
                    self._stuck.append(process)
                silent: dict[str, Scalar] = {
                    "folder": name,
                    "filesystem": mount.kind,
                    "server": mount.device.partition(":")[0],
                    "seconds": round(time.monotonic() - since, 1),
                }
                known = self._answers[name] = self._reading(now, kind, silent, "bad")
        self._stuck = [process for process in self._stuck if process.poll() is None]
        if asks and name not in self._asked and len(self._stuck) < 3:
            self._ask(name, folder)
        pending: dict[str, Scalar] = {"folder": name, "filesystem": mount.kind, "error": "not asked yet"}
        return known or self._reading(now, kind, pending, "unreadable")

    def _ask(self, name: str, folder: str) -> None:
        try:
            process = subprocess.Popen(
                [*self._stat, folder], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True,
            )  # fmt: skip
        except OSError:  # no `stat` here: the folder stays unreadable
            return
        self._asked[name] = (process, time.monotonic())

    def _answer(self, now: float, kind: str, name: str, mount: Mount, process: subprocess.Popen[str]) -> Reading:
        words = process.stdout.read().split() if process.stdout is not None else []
        if process.stdout is not None:
            process.stdout.close()
        if process.returncode != 0 or len(words) != 5:
            gone: dict[str, Scalar] = {"folder": name, "filesystem": mount.kind, "error": "stat -f failed"}
            return self._reading(now, kind, gone, "unreadable")
        size, blocks, free, inodes, free_inodes = map(int, words)
        values = _values(size, blocks, free, inodes, free_inodes)
        return self._reading(
            now, kind, {"folder": name, "filesystem": mount.kind, "read_only": mount.read_only, **values}
        )


def _end(process: subprocess.Popen[str]) -> bool:
    """Kill a helper; False when even that has to wait for the server."""
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    try:
        process.wait(0.2)
    except subprocess.TimeoutExpired:
        return False
    return True


def _values(size: int, blocks: int, free: int, inodes: int, free_inodes: int) -> dict[str, Scalar]:
    return {
        "total_bytes": blocks * size,
        "free_bytes": free * size,
        "inodes": inodes,
        "free_inodes": free_inodes,
    }


def read_mounts(path: str) -> list[Mount]:
    """All mounts, the newest last."""
    mounts = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            fields, rest = before.split(), after.split()
            if len(fields) < 6 or len(rest) < 3:
                continue
            read_only = "ro" in fields[5].split(",") or "ro" in rest[2].split(",")
            mounts.append(Mount(_plain(fields[4]), rest[0], _plain(rest[1]), read_only=read_only))
    return mounts


def mount_of(folder: str, mounts: list[Mount]) -> Mount | None:
    """The mount that a folder lies on, without touching it."""
    best: Mount | None = None
    for mount in mounts:
        inside = folder == mount.point or folder.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def _plain(text: str) -> str:
    r"""mountinfo writes a blank as \\040."""
    return text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
