"""The commit record of a checkpoint on storage, pure: a JSON file written last, with a digest over itself.

    STORAGE/ROLE/l000-s000000012-e003/MEMBER.r0.safetensors ... manifest.json

A folder without a valid manifest is no checkpoint. There is no pointer to the latest one: it is derived by reading manifests.
"""

from __future__ import annotations

import re

import msgspec

from easyckpt import digest
from easyckpt.errors import Corrupt, Foreign
from easyckpt.layout import FORMAT, Count, Rewind, SegmentHeader, Version

FILE_NAME = "manifest.json"


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's file of a checkpoint."""

    rank: Count
    """Rank inside the member."""
    file: str
    """Name inside the checkpoint's folder."""
    nbytes: Count
    """Length of the file."""
    prefix_bytes: Count
    """Bytes before the tensors."""
    prefix_digest: str
    """Of those bytes; they hold the digests of all others."""
    state_digest: str
    """Over the tensors of this rank."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One checkpoint on storage."""

    member: str
    """The member whose state was flushed."""
    role: str
    """Members of one role are replicas: any of them can restore from this."""
    ranks: Count
    """Ranks of the member, one shard each."""
    lineage: Count
    """Of the version."""
    step: Count
    """Of the version."""
    epoch: Count
    """Membership epoch in which it was saved."""
    chain: str
    """Hash chain of the applied (step, batch digest) pairs."""
    created_at: float
    """Seconds since 1970 at the save."""
    shards: tuple[Shard, ...]
    """In rank order."""
    rewinds: tuple[Rewind, ...] = ()
    """Every going back in the history of this state."""
    digest_kind: str = digest.KIND
    """Name of the checksum."""
    format: int = FORMAT
    """Version of this layout."""

    @property
    def version(self) -> Version:
        return (self.lineage, self.step)

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


class _Signed(msgspec.Struct, frozen=True, kw_only=True):
    digest: str
    manifest: msgspec.Raw


def folder_name(header: SegmentHeader | Manifest) -> str:
    """Where a checkpoint lies below storage."""
    return f"{header.role}/l{header.lineage:03d}-s{header.step:09d}-e{header.epoch:03d}"


_FOLDER = re.compile(r"l(\d+)-s(\d+)-e(\d+)")


def parse_folder(name: str) -> Version | None:
    """(lineage, step) out of the last part of a checkpoint's folder; None for anything else."""
    found = _FOLDER.fullmatch(name)
    return (int(found[1]), int(found[2])) if found else None


def shard_name(header: SegmentHeader, suffix: str = "") -> str:
    return f"{header.member}.r{header.rank}{suffix}.safetensors"


def of(headers: list[SegmentHeader], shards: list[Shard]) -> Manifest:
    """The manifest of a whole member."""
    first = headers[0]
    return Manifest(
        member=first.member,
        role=first.role,
        ranks=first.ranks,
        lineage=first.lineage,
        step=first.step,
        epoch=first.epoch,
        chain=first.chain,
        created_at=first.created_at,
        rewinds=first.rewinds,
        shards=tuple(sorted(shards, key=lambda shard: shard.rank)),
    )


def encode(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return b'{"digest":"' + digest.digest_bytes(body).encode() + b'","manifest":' + body + b"}\n"


def decode(raw: bytes, *, where: str) -> Manifest:
    """Raises Corrupt or Foreign; any changed byte is found."""
    try:
        signed = msgspec.json.decode(raw, type=_Signed)
        if digest.digest_bytes(bytes(signed.manifest)) != signed.digest:
            raise Corrupt(f"{where} does not match its digest; this checkpoint is ignored, an older one is used")
        manifest = msgspec.json.decode(signed.manifest, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(
            f"{where} is not a manifest ({error}); this checkpoint is ignored, an older one is used"
        ) from error
    if manifest.format > FORMAT:
        raise Foreign(f"{where} has format {manifest.format}, this version reads {FORMAT}: update easyckpt to use it")
    if encode(manifest) != raw:
        raise Corrupt(f"{where} was changed after it was written; this checkpoint is ignored, an older one is used")
    if {shard.rank for shard in manifest.shards} != set(range(manifest.ranks)):
        raise Foreign(f"{where} does not name one shard for each of {manifest.ranks} ranks; it is ignored")
    return manifest
