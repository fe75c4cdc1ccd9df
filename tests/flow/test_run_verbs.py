"""The other verbs beside a live run: they ask its master, agree with each other, and know what to say when nobody answers."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.jobs import AIMASTER, Job, job, processes_of, until

pytestmark = pytest.mark.timeout(120)

WAITING = "print('up', flush=True)\nimport time\ntime.sleep(300)\n"


def aimaster(*words: str, folder: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*AIMASTER, *words],
        capture_output=True,
        text=True,
        timeout=40,
        check=False,
        cwd=folder,
        env={**os.environ, "NO_COLOR": "1", **environment},
    )


def begin(folder: Path, name: str = "run") -> tuple[str, ...]:
    script = folder / "train.py"
    script.write_text(WAITING)
    return ("--", sys.executable, str(script))


def is_up(one: Job) -> None:
    until(lambda: "\nup\n" in one.output.read_text(), f"the command is up\n{one.story()}", 30)


def test_verbs_beside_a_live_run(tmp_path):
    """status, logs, incidents, checkpoints and stop find the run by folder, by address and as the newest; a second run in the
    folder is refused; after the end the last picture stays.
    """
    run = tmp_path / "runs" / "train"
    run.parent.mkdir()
    with job(run, *begin(tmp_path)) as one:
        is_up(one)
        seen = json.loads(aimaster("status", "--run-dir", str(run), "--json").stdout)
        assert (seen["state"], seen["members"][0]["state"]) == ("running", "running")
        pid = seen["members"][0]["process"]["pid"]
        url = json.loads(one.places.master.read_bytes())["url"]
        for found in (
            aimaster("status", folder=tmp_path),
            aimaster("status", folder=tmp_path, AIMASTER_URL=url),
            aimaster("status", "--master", url, folder=tmp_path),
        ):
            assert found.returncode == 0, found.stderr
            assert f" {pid}\n" in found.stdout
            assert "command-0" in found.stdout
        assert aimaster("logs", "command-0", "--run-dir", str(run)).stdout == "up\n"
        assert "command-0" in aimaster("logs", "nobody", "--run-dir", str(run)).stderr
        assert aimaster("incidents", "--run-dir", str(run)).returncode == 0
        assert aimaster("checkpoints", "--run-dir", str(run)).returncode == 0
        again = aimaster("run", "--run-dir", str(run), *begin(tmp_path))
        assert again.returncode == 2
        assert "in use by a live run" in again.stderr
        assert aimaster("stop", "--wait", "--reason", "enough seen", folder=tmp_path).returncode == 0
        assert one.wait(20) == 130, one.story()
        end = json.loads(one.places.summary.read_bytes())
        assert end["outcome"] == "stopped"
        assert "enough seen" in end["reason"]
        assert not processes_of(run)
        last = aimaster("status", "--run-dir", str(run))
        assert last.returncode == 0
        assert "enough seen" in last.stdout
        assert last.stdout.startswith("train stopped")
        gone = aimaster("stop", "--run-dir", str(run))
        assert gone.returncode == 0
        assert "ended already: stopped" in gone.stderr
        assert aimaster("logs", "-f", "command-0", "--run-dir", str(run)).stdout == "up\n"


def test_two_runs_at_once_do_not_disturb_each_other(tmp_path):
    """Two fronts in two folders: one is killed with all that is its own, the other does not notice."""
    with job(tmp_path / "a", *begin(tmp_path)) as one, job(tmp_path / "b", *begin(tmp_path)) as other:
        is_up(one)
        is_up(other)
        kept = other.pid("command-0")
        one.interrupt(signal.SIGTERM)
        assert one.wait(40) == 130, one.story()
        assert other.pid("command-0") == kept
        assert other.incidents_all() == []
        other.interrupt()
        assert other.wait(40) == 130


def test_the_wished_port_is_taken_or_refused(tmp_path):
    """--port is the master's port; one that is in use is refused before anything starts."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = aimaster("run", "--port", str(port), "--run-dir", str(tmp_path / "x"), "--", "true")
        assert refused.returncode == 2
        assert f"port {port}" in refused.stderr
        assert not (tmp_path / "x").exists()
    with job(tmp_path / "y", "--port", str(port), *begin(tmp_path)) as one:
        is_up(one)
        assert json.loads(one.places.master.read_bytes())["url"].endswith(f":{port}")
        one.interrupt()
        assert one.wait(40) == 130, one.story()


def test_json_is_the_only_thing_on_stdout(tmp_path):
    """With --json the summary is stdout's one document, and the command's own output goes where the talk goes."""
    ended = aimaster(
        "run",
        "--json",
        "--run-dir",
        str(tmp_path / "run"),
        "--",
        sys.executable,
        "-c",
        "print('hello'); raise SystemExit(3)",
    )
    assert ended.returncode == 1
    document = json.loads(ended.stdout)
    assert document["children"]["command-0"]["exit_code"] == 3
    assert "hello" in ended.stderr
