"""The bytes of a segment."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from easyckpt import digest, layout
from easyckpt.digest import TensorDigest
from easyckpt.errors import BadSegment, Foreign, Unsealed
from easyckpt.layout import DTYPES, Rewind, SegmentHeader, SegmentName, TensorEntry


def header_of(entries: list[TensorEntry], **fields) -> SegmentHeader:
    base = {"member": "policy-0", "role": "policy", "rank": 0, "ranks": 1, "lineage": 0, "step": 3}
    return SegmentHeader(**{**base, **fields}, tensors=layout.place(entries))


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
entry_lists = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), shapes), max_size=8).map(
    lambda drawn: [
        TensorEntry(name=f"m/{i}.~é", dtype=dtype, shape=shape, digest=f"{i:032x}")
        for i, (dtype, shape) in enumerate(drawn)
    ]
)


@given(entry_lists, st.integers(0, 2**40), st.integers(0, 999))
def test_a_header_comes_back_as_it_was_written(entries, step, lineage):
    """encode and decode are inverse for any tensors, and the version can be read from the first bytes alone."""
    header = header_of(
        entries, step=step, lineage=lineage, rewinds=(Rewind(lineage=1, step=2),), extra={"a": [1, None]}
    )
    raw = layout.encode(header)
    assert layout.decode(raw, where="x") == header
    assert layout.peek(raw[: layout.PEEK_BYTES]) == (lineage, step)
    assert len(raw) % layout.PAGE_BYTES == 0
    assert layout.prefix_length(raw[:8], file_bytes=len(raw) + header.data_bytes, where="x") == len(raw)


def test_any_safetensors_reader_opens_a_segment(tmp_path):
    """Every type that safetensors knows is read by its own library; others appear as bytes; aliases are stored once."""
    entries = [TensorEntry(name=dtype, dtype=dtype, shape=(3, 5)) for dtype in DTYPES]
    entries.append(TensorEntry(name="tied", dtype="float32", shape=(3, 5), alias_of="float32"))
    header = header_of(entries)
    path = tmp_path / "x.safetensors"
    path.write_bytes(layout.encode(header) + bytes(header.data_bytes))
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(DTYPES)
        assert str(file.get_tensor("bfloat16").dtype) == "torch.bfloat16"
        assert tuple(file.get_tensor("complex128").shape) == (3, 5, 16)
    assert header.data_bytes == sum(15 * width for width, _ in DTYPES.values())


def test_every_flipped_byte_of_a_header_is_found():
    """Each byte before the tensors, the seal and the padding included, changes the digest or the length."""
    header = header_of([TensorEntry(name="w", dtype="float32", shape=(2, 2))])
    raw = layout.encode(header)
    for at in range(len(raw)):
        broken = bytearray(raw)
        broken[at] ^= 0x41
        with pytest.raises(BadSegment):
            read(bytes(broken), len(raw) + header.data_bytes)


def read(raw: bytes, file_bytes: int) -> SegmentHeader:
    return layout.decode(raw[: layout.prefix_length(raw[:8], file_bytes=file_bytes, where="x")], where="x")


def test_digests_have_room_of_a_fixed_width():
    """The header is as long without digests as with them, so memory is laid out before the bytes are known."""
    header = header_of([TensorEntry(name="w", dtype="float32", shape=(2, 2))])
    room = layout.room_for(header)
    assert (
        len(layout.encode(layout.with_digests(header, {"w": TensorDigest("a" * 32)}), room))
        == len(layout.encode(header, room))
        == room
    )
    many = header_of([TensorEntry(name=f"w{i}", dtype="float32", shape=(2,)) for i in range(500)])
    layout.encode(
        layout.with_digests(many, {entry.name: TensorDigest("b" * 32) for entry in many.tensors}), layout.room_for(many)
    )


def test_a_zero_length_means_unsealed():
    with pytest.raises(Unsealed):
        layout.prefix_length(bytes(8), file_bytes=8192, where="x")


@pytest.mark.parametrize("offsets", [(0, 15), (16, 32), (4, 20), (0, 0)], ids=["short", "gap", "shifted", "none"])
def test_tensors_with_impossible_bounds_are_refused(offsets):
    """A header that its digest proves may still lie about its bytes: a file from elsewhere cannot make us read beyond it."""
    entry = TensorEntry(name="w", dtype="float32", shape=(2, 2), offsets=offsets)
    header = msgspec.structs.replace(header_of([]), tensors=(entry,))
    with pytest.raises(Foreign):
        layout.decode(layout.encode(header), where="x")


@pytest.mark.parametrize(
    ("name", "parsed"),
    [
        ("policy-0.r3.s1.safetensors", SegmentName(member="policy-0", rank=3, slot=1)),
        ("policy-0.r0.peer.s0.safetensors", SegmentName(member="policy-0", rank=0, slot=0, peer=True)),
        ("policy-0.r0.safetensors", None),
        ("../x.r0.s0.safetensors", None),
        ("policy-0.r0.s0.safetensors.pin.1.2.3", None),
    ],
)
def test_names_of_segments(name, parsed):
    assert layout.parse_name(name) == parsed
    if parsed is not None:
        assert str(parsed) == name


def test_a_large_tensor_is_proven_in_parts(monkeypatch):
    """Its digest is the digest of its parts' digests, however the bytes are fed; a small one has no parts."""
    monkeypatch.setattr(digest, "PART_BYTES", 10)
    block = bytes(range(35))
    whole = digest.TensorHash()
    for at in range(0, 35, 4):
        whole.update(memoryview(block)[at : at + 4])
    found = whole.finish()
    assert found == digest.digest_tensor(memoryview(block))
    assert found.parts == tuple(digest.digest_bytes(block[at : at + 10]) for at in range(0, 35, 10))
    assert digest.part_count(35) == len(found.parts) == 4
    assert digest.digest_tensor(memoryview(block[:10])) == (digest.digest_bytes(block[:10]), ())
    assert digest.part_count(10) == 0


def test_large_tensors_begin_at_a_cache_line_whatever_lies_between_them_in_the_state():
    """A 0-dim step after each moment moves none of them; the small ones are aligned to their elements; no byte is lost."""
    kinds = [("float32", (4, 16)), ("float32", ()), ("bfloat16", (32, 3)), ("int64", (3,)), ("uint8", (64,))]
    placed = layout.place(
        [TensorEntry(name=str(index), dtype=dtype, shape=shape) for index, (dtype, shape) in enumerate(3 * kinds)]
    )
    for entry in placed:
        width = layout.DTYPES[entry.dtype][0]
        assert entry.offsets[0] % (64 if entry.nbytes % 64 == 0 else width) == 0
    spans = sorted(entry.offsets for entry in placed)
    assert spans[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))
