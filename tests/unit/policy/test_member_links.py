"""The members' links against real servers that hold, die, move, refuse and stall."""

import http.server
import json
import socket
import socketserver
import threading
import time

import pytest

from aimaster.wire.checkpoint import FetchReply, FetchRequest, SaveTrouble, SealedNotice, SealedReply, Version
from aimaster.wire.codec import decode, encode
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.places import ENV_CONTROLLER_URL, agent_socket
from aimaster.wire.training import Fresh, Stop, Turn, Wait, Word
from rl_runtime.links.agent import AgentLink
from rl_runtime.links.base import RefusedError
from rl_runtime.links.controller import ControllerLink

TURN = Turn(member=MemberId("policy-0"), incarnation=Incarnation(0), node="node-0", version=None, stage=Fresh())
SECRET = "ab" * 16


class Handler(http.server.BaseHTTPRequestHandler):
    """Takes the next act of its server's script: (status, body), "cut" or "stall"."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        act = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        self.server.requests.append((self.path, body, self.headers["Authorization"]))
        if act == "cut":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if act == "stall":
            self.server.released.wait(30)
            self.close_connection = True
            return
        status, content, hold = act
        time.sleep(hold)
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

    def address_string(self):
        return "test"


class Server(socketserver.ThreadingMixIn, http.server.HTTPServer):
    daemon_threads = True


class UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def serve():
    """Start servers with a script each; all end with the test."""
    servers = []

    def start(*script, path=None):
        server = UnixServer(str(path), Handler) if path else Server(("127.0.0.1", 0), Handler)
        server.script, server.requests, server.released = list(script), [], threading.Event()
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.released.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.delenv(ENV_CONTROLLER_URL, raising=False)
    token = tmp_path / "token"
    token.write_text(f"read={'00' * 16}\nmember={SECRET}\n")
    token.chmod(0o600)
    return tmp_path


def point_at(run, server):
    (run / "controller.json").write_text(
        json.dumps({"url": f"http://127.0.0.1:{server.server_address[1]}", "pid": 1, "incarnation": 0})
    )


def says(word, hold=0.0):
    return (200, encode(word), hold)


@pytest.fixture
def link_to():
    """Make links; all are closed with the test."""
    links = []

    def make(run, beats=None, **settings):
        links.append(ControllerLink(run, beat=(beats if beats is not None else []).append, **settings))
        return links[-1]

    yield make
    for link in links:
        link.close()


STOP = Stop(reason="finished")


def test_a_question_is_asked_with_the_members_secret_over_one_connection(run, serve, link_to):
    """Keep-alive, msgpack, the role's own token."""
    server = serve(says(Wait(reason="x")), says(STOP))
    point_at(run, server)
    link = link_to(run)
    assert link.turn(TURN) == Wait(reason="x")
    connection = link._connection
    assert link.turn(TURN) == STOP
    assert link._connection is connection
    assert [(path, decode(body, Turn), who) for path, body, who in server.requests] == [
        ("/v1/turn", TURN, f"Bearer {SECRET}")
    ] * 2


def test_a_cut_connection_and_a_server_error_are_asked_again(run, serve, link_to):
    """The same question is sent until it is answered."""
    server = serve("cut", (503, b"{}", 0.0), "cut", says(STOP))
    point_at(run, server)
    assert link_to(run).turn(TURN) == STOP
    assert [decode(body, Turn) for _, body, _ in server.requests] == [TURN] * 4


def test_a_restarted_controller_is_found_at_its_new_address(run, serve, link_to):
    """The address is read anew at each connection; until there is one, the member beats and waits."""
    beats = []
    answers = []
    asking = threading.Thread(target=lambda: answers.append(link_to(run, beats).turn(TURN)))
    asking.start()
    deadline = time.monotonic() + 30
    while len(beats) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    dead = socket.create_server(("127.0.0.1", 0))
    (run / "controller.json").write_text(json.dumps({"url": f"http://127.0.0.1:{dead.getsockname()[1]}"}))
    dead.close()
    point_at(run, serve(says(STOP)))
    asking.join(30)
    assert answers == [STOP]


def test_the_environment_names_the_address_first(run, serve, link_to, monkeypatch):
    """A proxy or a fixed address is used in place of controller.json."""
    server = serve(says(STOP))
    monkeypatch.setenv(ENV_CONTROLLER_URL, f"http://127.0.0.1:{server.server_address[1]}")
    assert link_to(run).turn(TURN) == STOP


def test_waiting_for_an_answer_beats(run, serve, link_to):
    """While the controller holds a question, the training thread says that it lives, more than once a second."""
    point_at(run, serve(says(STOP, hold=1.2)))
    beats = []
    link_to(run, beats).turn(TURN)
    assert len(beats) >= 3
    assert set(beats) == {"wait"}


def test_a_silent_connection_is_given_up_and_the_question_sent_again(run, serve, link_to):
    """A half-open connection does not hold a member for ever."""
    server = serve("stall", says(STOP))
    point_at(run, server)
    assert link_to(run, silence_seconds=0.5).turn(TURN) == STOP
    assert len(server.requests) == 2


def test_a_refusal_is_an_error_with_the_controllers_words(run, serve, link_to):
    """4xx: asking again would not help."""
    point_at(run, serve((400, b'{"error": "no such member"}', 0.0)))
    with pytest.raises(RefusedError, match="no such member"):
        link_to(run).turn(TURN)


def test_large_questions_and_answers_pass(run, serve, link_to):
    """More than any socket buffer holds, both ways."""
    answer = Wait(reason="x" * 5_000_000)
    point_at(run, serve(says(answer)))
    big = Turn(member=MemberId("p" * 5_000_000), incarnation=Incarnation(0), node="n", version=None, stage=Fresh())
    assert link_to(run).turn(big) == answer


def test_the_agent_is_asked_over_its_socket(run, serve, tmp_path):
    """A fetch returns what the agent has; a notice says which segment was sealed, and its answer whether flushes work; a lost one is told."""
    reply = FetchReply(places=(), seconds=1.5)
    told = encode(SealedReply(flush_trouble="the disk is full"))
    server = serve((200, encode(reply), 0.6), (200, told, 0.0), (200, b"", 0.0), path=agent_socket(tmp_path))
    beats = []
    agent = AgentLink(tmp_path, run, beat=beats.append)
    assert agent.fetch(FetchRequest(role="policy", at=Version(0, 3))) == reply
    assert beats
    notice = SealedNotice(member=MemberId("policy-0"), rank=0, name="s", version=Version(0, 3), flush=True)
    agent.sealed(notice)
    assert decode(server.requests[1][1], SealedNotice) == notice
    assert agent.flush_trouble == "the disk is full"
    trouble = SaveTrouble(member=MemberId("policy-0"), version=Version(0, 4), text="no room")
    agent.lost(trouble)
    assert decode(server.requests[2][1], SaveTrouble) == trouble
    asked = ["/v1/snapshots/fetch", "/v1/snapshots/sealed", "/v1/snapshots/trouble"]
    assert [path for path, _, _ in server.requests] == asked
    assert agent.unannounced == 0


def test_an_absent_agent_costs_nothing(run, tmp_path):
    """Training goes on without it: an empty reply, a counted notice, no exception."""
    agent = AgentLink(tmp_path, run, beat=lambda _: None)
    assert agent.fetch(FetchRequest(role="policy")).places == ()
    agent.sealed(SealedNotice(member=MemberId("policy-0"), rank=0, name="s", version=Version(0, 3), flush=False))
    assert agent.unannounced == 1


def test_the_union_of_words_is_decoded_by_tag():
    """A word comes back as what it is."""
    assert decode(encode(STOP), Word) == STOP
