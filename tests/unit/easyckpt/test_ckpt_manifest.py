"""The commit record."""

import pytest

from easyckpt import manifest
from easyckpt.errors import EasyckptError
from easyckpt.layout import Rewind
from easyckpt.manifest import Manifest, Shard


def record(ranks: int = 1) -> Manifest:
    shards = tuple(
        Shard(rank=r, file=f"p-0.r{r}.safetensors", nbytes=9, prefix_bytes=8, prefix_digest="ab", state_digest="cd")
        for r in range(ranks)
    )
    return Manifest(
        member="p-0", role="p", ranks=ranks, lineage=1, step=12, epoch=3, chain="c", created_at=1.5, shards=shards,
        rewinds=(Rewind(lineage=1, step=4),),
    )  # fmt: skip


def test_a_manifest_comes_back_as_it_was_written():
    assert manifest.decode(manifest.encode(record(2)), where="m") == record(2)
    assert manifest.folder_name(record()) == "p/l001-s000000012-e003"
    assert manifest.parse_folder("l001-s000000012-e003") == (1, 12)
    assert manifest.parse_folder("l001-s000000012-e003.part") is None


def test_every_flipped_or_missing_byte_of_a_manifest_is_found():
    raw = manifest.encode(record())
    for at in range(len(raw)):
        for bad in (raw[:at] + bytes([raw[at] ^ 0x20]) + raw[at + 1 :], raw[:at], raw[:at] + raw[at + 1 :]):
            with pytest.raises(EasyckptError):
                manifest.decode(bad, where="m")


def test_a_manifest_that_lacks_a_rank_is_no_checkpoint():
    partial = Manifest(
        **{f: getattr(record(2), f) for f in Manifest.__struct_fields__ if f != "shards"}, shards=record(1).shards
    )
    with pytest.raises(EasyckptError, match="one shard for each"):
        manifest.decode(manifest.encode(partial), where="m")
