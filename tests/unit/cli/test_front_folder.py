"""The run folder: begun, resumed, kept, numbered, and never shared."""

import stat
import subprocess
import sys

import pytest

from aimaster.cli.exits import UsageError
from aimaster.cli.front_folder import open_folder, resumable
from aimaster.journal import Journal
from aimaster.wire.places import RunPlaces

SOURCE = ("job.toml",)


def begin(run, kind="rl", source=SOURCE, now=1.0):
    return open_folder(run, name="tiny", kind=kind, source=source, now=now)


def test_a_new_folder_has_an_id_secrets_and_places(tmp_path):
    """A fresh run gets an id of eight hex digits and one secret a role, readable by its owner alone."""
    folder = begin(tmp_path / "tiny")
    assert not folder.resumed
    assert len(folder.info.run_id) == 8
    assert int(folder.info.run_id, 16) >= 0
    lines = folder.places.token.read_text().splitlines()
    assert [line.split("=")[0] for line in lines] == ["read", "operate", "member"]
    assert len({line.split("=")[1] for line in lines}) == 3
    assert stat.S_IMODE(folder.places.token.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.places.run.stat().st_mode) == 0o700
    folder.close()


def test_a_run_that_was_cut_off_is_resumed_with_its_identity(tmp_path):
    """After a killed front the lock is free and the same command goes on: same id, same secrets, one start more."""
    first = begin(tmp_path / "tiny")
    token = first.places.token.read_bytes()
    first.close()
    again = begin(tmp_path / "tiny", now=2.0)
    assert again.resumed
    assert again.info.run_id == first.info.run_id
    assert again.info.created_at == 1.0
    assert again.info.starts == 2
    assert again.places.token.read_bytes() == token
    again.close()


def test_a_finished_run_is_kept_and_a_numbered_folder_begun(tmp_path):
    """The folder of a finished run stays as it is; the next one stands beside it, with a number."""
    first = begin(tmp_path / "tiny")
    first.mark("finished")
    first.close()
    second = begin(tmp_path / "tiny")
    assert second.places.run == tmp_path / "tiny-2"
    assert second.info.run_id != first.info.run_id
    second.mark("finished")
    second.close()
    third = begin(tmp_path / "tiny")
    assert third.places.run == tmp_path / "tiny-3"
    third.close()


def test_a_folder_in_use_by_a_live_run_is_refused(tmp_path):
    """While another process holds the folder, the message names that process and what to do; its end frees the folder."""
    script = (
        "import sys, time; from aimaster.cli.front_folder import open_folder; from pathlib import Path\n"
        "folder = open_folder(Path(sys.argv[1]), name='tiny', kind='rl', source=('job.toml',), now=1.0)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    run = tmp_path / "tiny"
    with subprocess.Popen([sys.executable, "-c", script, str(run)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"up\n"
        with pytest.raises(UsageError, match=f"in use by a live run .process {holder.pid}.*aimaster stop"):
            begin(run)
        holder.kill()
        holder.wait()
        folder = begin(run)
        assert folder.resumed
        folder.close()


def test_a_folder_of_something_else_is_not_taken(tmp_path):
    """A folder that holds files but no run is left alone."""
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="not a run folder"):
        begin(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} <= {"notes.txt", "lock"}


def test_a_damaged_journal_is_named_before_anything_is_started(tmp_path):
    """With the place of the damage and what to do; nothing is changed."""
    first = begin(tmp_path)
    first.close()
    with Journal.open(first.places.journal) as journal:
        for payload in (b"one", b"two", b"three"):
            journal.append_now([payload])
    (segment,) = first.places.journal.glob("*.journal")
    data = bytearray(segment.read_bytes())
    data[data.index(b"two")] ^= 1
    segment.write_bytes(data)
    with pytest.raises(UsageError, match=r"is damaged.*nothing was changed"):
        begin(tmp_path)
    assert segment.read_bytes() == data


def test_a_damaged_run_record_is_named(tmp_path):
    """A run.json that cannot be read is an error with its path, never a fresh start over old state."""
    RunPlaces(tmp_path).info.write_text("{")
    with pytest.raises(UsageError, match=r"run\.json"):
        begin(tmp_path)


@pytest.mark.parametrize(
    ("kind", "state", "same_source", "goes_on"),
    [
        ("rl", "running", True, True),
        ("rl", "stopped", True, True),
        ("rl", "failed", True, True),
        ("rl", "failed", False, True),
        ("rl", "finished", True, False),
        ("command", "running", True, True),
        ("command", "stopped", True, True),
        ("command", "stopped", False, False),
        ("command", "failed", True, False),
        ("command", "finished", True, False),
    ],
)
def test_which_runs_go_on_in_their_folder(tmp_path, kind, state, same_source, goes_on):
    """A job of ours resumes whatever it stopped of; a command only when it was interrupted, and is the same."""
    folder = begin(tmp_path / "x", kind=kind)
    folder.mark(state)
    folder.close()
    assert resumable(folder.info, kind, SOURCE if same_source else ("other",)) == goes_on


def test_another_kind_of_job_never_goes_on_in_a_folder(tmp_path):
    """A command does not resume a training job's folder."""
    folder = begin(tmp_path / "x")
    folder.close()
    assert not resumable(folder.info, "command", SOURCE)


def test_a_start_that_was_killed_before_its_record_stood_is_taken_over(tmp_path):
    """Only what a front writes first lies there: nothing was begun, and the folder is used as a new one."""
    run = tmp_path / "tiny"
    (run / "logs").mkdir(parents=True)
    (run / "storage").mkdir()
    for name in ("lock", "token.tmp", "run.json.tmp"):
        (run / name).write_text("")
    folder = begin(run)
    assert folder.places.run == run
    assert not folder.resumed
    folder.close()


def test_a_full_storage_without_its_record_is_not_taken(tmp_path):
    """A checkpoint whose run.json is gone is somebody's work."""
    (tmp_path / "storage" / "policy").mkdir(parents=True)
    with pytest.raises(UsageError, match="not a run folder"):
        begin(tmp_path)


def test_a_refused_resumption_changes_nothing(tmp_path):
    """Whoever refuses to go on does so before the record is written and the summary removed; the folder is free again."""
    first = begin(tmp_path / "tiny")
    first.close()
    first.places.summary.write_text("kept")
    record = first.places.info.read_bytes()

    def refuse(_):
        raise UsageError("another configuration")

    with pytest.raises(UsageError, match="another configuration"):
        open_folder(tmp_path / "tiny", name="tiny", kind="rl", source=SOURCE, now=2.0, accept=refuse)
    assert (first.places.info.read_bytes(), first.places.summary.read_text()) == (record, "kept")
    begin(tmp_path / "tiny").close()


def test_a_folder_named_by_the_user_that_holds_another_kind_is_refused(tmp_path):
    """An unfinished job is not passed over in silence for a numbered folder beside it when its very folder was asked for."""
    begin(tmp_path / "tiny").close()
    with pytest.raises(UsageError, match="unfinished run of another kind"):
        open_folder(tmp_path / "tiny", name="x", kind="command", source=("x",), now=2.0, named=True)


@pytest.mark.parametrize("name", ["lock", "token.tmp", "run.json.tmp"])
def test_what_cannot_be_written_is_named(tmp_path, name):
    """A folder where a file should be: the sentence names it, exit 2, and no traceback."""
    (tmp_path / name).mkdir()
    if name != "lock":
        RunPlaces(tmp_path).info.write_bytes(
            b'{"run_id":"0a","name":"tiny","kind":"rl","source":["job.toml"],"created_at":1.0}'
        )
    with pytest.raises(UsageError, match=f"cannot be used: .*{name}: Is a directory"):
        begin(tmp_path)


def test_an_empty_token_file_is_made_anew(tmp_path):
    """Without secrets nobody would be asked for one."""
    first = begin(tmp_path / "tiny")
    first.close()
    first.places.token.write_text("")
    begin(tmp_path / "tiny").close()
    assert len(first.places.token.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("data", "mode", "says"),
    [(b"\xff\xfe\x00", 0o600, "role=hex"), (b"read=" + b"a" * 32, 0o600, "no line for"), (None, 0o644, "chmod 600")],
)
def test_a_token_file_that_no_program_would_take_is_refused_at_once(tmp_path, data, mode, says):
    """Damaged, without a role, or readable by others: said once, before anything starts, and the record stays as it was."""
    first = begin(tmp_path / "tiny")
    first.close()
    record = first.places.info.read_bytes()
    if data is not None:
        first.places.token.write_bytes(data)
    first.places.token.chmod(mode)
    with pytest.raises(UsageError, match=says):
        begin(tmp_path / "tiny")
    assert first.places.info.read_bytes() == record
