"""Finding and asking a master: the order of precedence, the words of an error, the token."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import pytest

from aimaster.cli import reach
from aimaster.cli.app import main
from aimaster.cli.exits import MasterUnreachableError, UsageError
from aimaster.cli.front_folder import open_folder
from aimaster.cli.status import member_row
from aimaster.wire.ids import MemberId, NodeId
from aimaster.wire.messages import Progress
from aimaster.wire.status import JobStatus, MemberStatus

STATUS = JobStatus(
    run_id="0a",
    name="tiny",
    kind="rl",
    state="degraded",
    started_at=1.0,
    now=2.0,
    term=3,
    step=4,
    steps=9,
    figures={"reward_mean": 0.5, "tokens_per_second": 1234.4, "staleness_mean": 1.0},
    members=(
        MemberStatus(member=MemberId("policy-0"), role="policy", node=NodeId("node-0"), state="dead", incarnation=1),
    ),
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder, and no AIMASTER_URL."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AIMASTER_URL", raising=False)
    monkeypatch.delenv("AIMASTER_TOKEN_FILE", raising=False)
    return tmp_path


def make_run(name: str, *, url: str = "http://127.0.0.1:9", live: bool = True):
    folder = open_folder(reach.RUNS / name, name=name, kind="rl", source=("x",), now=1.0)
    folder.close()
    ticks = reach.start_ticks(os.getpid()) if live else 1
    folder.places.master.write_text(json.dumps({"url": url, "pid": os.getpid(), "start_ticks": ticks, "term": 1}))
    return folder.places


@pytest.fixture
def master(here):
    """A server that answers as a master does, for the run `tiny`."""
    seen: list[tuple[str, str, bytes]] = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            body = msgspec.json.encode(STATUS)
            if self.headers["Authorization"] != f"Bearer {reach.read_token(reach.RUNS / 'tiny', {})}":
                body = json.dumps({"error": "wrong token", "hint": "read RUN/token"}).encode()
                self.send_response(401)
            else:
                self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self):
            length = int(self.headers["Content-Length"])
            seen.append((self.path, self.headers["Authorization"], self.rfile.read(length)))
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        places = make_run("tiny", url=f"http://127.0.0.1:{server.server_port}")
        yield places, seen
        server.shutdown()
        thread.join()


def run_main(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_master_url_wins_over_environment_over_run_dir_over_newest(here):
    """The nearest wish wins, and the target says which it was."""
    places = make_run("a", url="http://127.0.0.1:1")
    make_run("b", url="http://127.0.0.1:2")
    os.utime(places.master, (0, 0))
    environ = {"AIMASTER_URL": "http://env:1"}
    assert reach.find("http://flag:1", places.run, environ).source == "--master http://flag:1"
    assert reach.find(None, places.run, environ).url == "http://env:1"
    assert reach.find(None, places.run, {}).url == "http://127.0.0.1:1"
    newest = reach.find(None, None, {})
    assert newest.url == "http://127.0.0.1:2"
    assert "newest live run" in newest.source


def test_a_dead_master_is_not_asked(here):
    """A master.json whose process is gone (or whose pid is another's now) names nobody."""
    places = make_run("a", live=False)
    target = reach.find(None, places.run, {})
    assert target.url == ""
    with pytest.raises(MasterUnreachableError, match=r"does not run.*--run-dir"):
        reach.picture(target)


def test_no_run_at_all_says_how_to_name_one(here):
    """With nothing to ask, the error lists the ways."""
    with pytest.raises(MasterUnreachableError, match="--master, no AIMASTER_URL, no --run-dir"):
        reach.find(None, None, {})
    with pytest.raises(UsageError, match="not a run folder"):
        reach.find(None, here, {})


def test_the_token_comes_from_the_run_or_from_a_file(here):
    """RUN/token by role; AIMASTER_TOKEN_FILE instead of it, never a flag."""
    places = make_run("a")
    kept = dict(line.split("=") for line in places.token.read_text().splitlines())
    assert reach.read_token(places.run, {}, "read") == kept["read"]
    other = here / "secret"
    other.write_text("operate=" + "f" * 32 + "\n")
    assert reach.read_token(places.run, {"AIMASTER_TOKEN_FILE": str(other)}) == "f" * 32
    assert reach.read_token(None, {}) == ""


def test_status_for_people_and_as_the_view_model(master, capsys):
    """The table and --json come from the same picture."""
    assert run_main("status") == 0
    shown = capsys.readouterr().out
    assert "tiny degraded  step 4/9  reward 0.500  1234 tokens/s  staleness 1.0" in shown
    assert "policy-0" in shown
    assert "\x1b" not in shown
    assert run_main("status", "--json") == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=JobStatus) == STATUS


def test_exit_code_of_a_degraded_run_is_4_when_asked(master):
    """Only --exit-code turns the state into a code."""
    assert run_main("status", "--exit-code") == 4


def test_stop_asks_with_the_token_of_the_run(master, capsys):
    """`stop` posts its reason with the operator's secret."""
    places, seen = master
    assert run_main("stop", "--reason", "enough") == 0
    path, token, body = seen[0]
    assert path == "/v1/stop"
    assert token == f"Bearer {reach.read_token(places.run, {})}"
    assert json.loads(body) == {"reason": "enough"}


def test_a_refusal_is_shown_in_the_master_s_words(master, capsys, here):
    """What the master answers to a wrong token is shown, with exit code 3 and how it was found."""
    secret = here / "secret"
    secret.write_text("operate=" + "0" * 32 + "\n")
    os.environ["AIMASTER_TOKEN_FILE"] = str(secret)
    try:
        assert run_main("status") == 3
    finally:
        del os.environ["AIMASTER_TOKEN_FILE"]
    assert "wrong token. read RUN/token" in capsys.readouterr().err


def test_nobody_listening_is_exit_3_and_names_the_address(here, capsys):
    """An address where nobody listens is unknown, not failed."""
    assert run_main("status", "--master", "http://127.0.0.1:1") == 3
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1" in said
    assert "--master" in said


def test_an_address_that_is_none_is_usage(here, capsys):
    """A master that is no URL is a wrong command line."""
    assert run_main("status", "--master", "localhost:8000") == 2
    assert "http://HOST:PORT" in capsys.readouterr().err


def test_a_run_that_has_ended_shows_its_last_picture(here, capsys):
    """Without a live master, the picture kept in the summary is shown."""
    places = make_run("a", live=False)
    places.summary.write_bytes(msgspec.json.encode({"outcome": "failed", "status": STATUS}))
    assert run_main("status", "--run-dir", str(places.run)) == 0
    said = capsys.readouterr().out
    assert "tiny failed" in said
    assert "last picture" in said


def test_of_a_run_that_was_stopped_nothing_is_told_as_if_it_went_on(here):
    """Its state is how it ended, and no member is in a phase: the last look at it fell in the middle of the stop."""
    places = make_run("a", live=False)
    beat = Progress(phase="startup", step=3)
    member = msgspec.structs.replace(STATUS.members[0], state="running", progress=beat)
    status = msgspec.structs.replace(STATUS, state="stopping", members=(member,))
    places.summary.write_bytes(msgspec.json.encode({"outcome": "stopped", "status": status}))
    last = reach.last_picture(places.run)
    assert last is not None
    assert (last.state, last.members[0].state, last.members[0].progress) == ("stopped", "stopped", None)
    assert "startup" not in member_row(msgspec.structs.replace(member, state="finished"))


def test_stop_and_logs_of_a_run_that_has_ended(here, capsys):
    """`stop` says so and exits 0, since it is as wished; `logs -f` shows what there is and returns."""
    places = make_run("a", live=False)
    info = json.loads(places.info.read_bytes()) | {"state": "finished"}
    places.info.write_text(json.dumps(info))
    places.summary.write_bytes(msgspec.json.encode({"outcome": "finished", "status": STATUS}))
    (places.logs / "master.log").write_text("hello\n")
    assert run_main("stop", "--run-dir", str(places.run)) == 0
    assert "ended already: finished" in capsys.readouterr().err
    assert run_main("logs", "-f", "master", "--run-dir", str(places.run)) == 0


def test_a_run_whose_front_and_master_are_gone_has_ended(here):
    """However its record stands; a living front or master says otherwise."""
    places = make_run("a")
    assert not reach.has_ended(places.run)
    make_run("b", live=False)
    assert not reach.has_ended(reach.RUNS / "b")
    info = json.loads((reach.RUNS / "b" / "run.json").read_bytes()) | {"front_pid": 2**22 + 1}
    (reach.RUNS / "b" / "run.json").write_text(json.dumps(info))
    assert reach.has_ended(reach.RUNS / "b")


def test_a_damaged_token_file_is_a_sentence_where_the_token_is_needed(master, capsys):
    """`stop` says what is wrong with the file, exit 2; `logs` does not need it."""
    places, _ = master
    places.token.write_bytes(b"\xff\xfe\x00")
    assert run_main("stop") == 2
    assert f"the token file {places.token} has a line that is not role=hex" in capsys.readouterr().err
    (places.logs / "master.log").write_text("hello\n")
    assert run_main("logs", "master") == 0
