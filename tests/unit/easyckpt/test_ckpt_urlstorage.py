"""Storage behind a URL."""

import time
import uuid

import fsspec
import pytest

from easyckpt import shm
from easyckpt.errors import AlreadyFlushed, Corrupt, EasyckptError, StorageError
from easyckpt.flush import flush_segment, tidy, verify_stored
from easyckpt.storage import FolderStorage, list_manifests, open_storage


@pytest.fixture
def url():
    where = f"memory://{uuid.uuid4().hex}/ckpts"
    yield where
    fsspec.filesystem("memory").store.clear()


def test_a_url_gets_the_same_files_as_a_folder(url, tmp_path, make_segment):
    segment = shm.read_segment(make_segment(4))
    for where in (url, tmp_path):
        record = flush_segment(segment, where)
        verify_stored(where, record)
        assert list_manifests(where) == [record]
    fs, root = fsspec.core.url_to_fs(url)
    for path in (path for path in tmp_path.rglob("*") if path.is_file()):
        assert fs.cat_file(f"{root}/{path.relative_to(tmp_path)}") == path.read_bytes()
    with pytest.raises(AlreadyFlushed):
        flush_segment(segment, url)
    with pytest.raises(AlreadyFlushed):
        open_storage(url).commit("trainer/l000-s000000004-e000", b"x")


def test_damage_is_found_and_retention_deletes(url, make_segment):
    records = [flush_segment(shm.read_segment(make_segment(step)), url) for step in (1, 2, 3)]
    assert tidy(url, role="trainer", keep=2, now=time.time()) == ["trainer/l000-s000000001-e000"]
    assert list_manifests(url) == records[:0:-1]
    fs, root = fsspec.core.url_to_fs(url)
    path = f"{root}/trainer/l000-s000000003-e000/trainer-0.r0.safetensors"
    raw = fs.cat_file(path)
    fs.pipe_file(path, raw[:-1] + b"\0" if raw[-1] else raw[:-1] + b"\1")
    with pytest.raises(Corrupt):
        verify_stored(url, records[2])
    fs.pipe_file(path, raw[:-9])
    with pytest.raises(Corrupt):
        verify_stored(url, records[2])


def test_a_store_that_fails_leaves_what_was_there(url, make_segment, monkeypatch):
    first = flush_segment(shm.read_segment(make_segment(1)), url)
    fs, _ = fsspec.core.url_to_fs(url)

    def fail(*_args, **_kwargs):
        raise PermissionError("the bucket says no")

    monkeypatch.setattr(type(fs), "pipe_file", fail)
    with pytest.raises(StorageError, match="the bucket says no"):
        flush_segment(shm.read_segment(make_segment(2)), url)
    assert list_manifests(url) == [first]


def test_an_unknown_scheme_is_told():
    with pytest.raises(EasyckptError, match="cannot be opened"):
        open_storage("nosuch://bucket/x")
    assert isinstance(open_storage("file:///tmp/x"), FolderStorage)
