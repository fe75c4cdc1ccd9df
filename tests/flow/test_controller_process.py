"""The controller as a real process, killed for real; policy members and workers are threads that follow the protocol."""

import contextlib
import http.client
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from aimaster.journal import Journal
from aimaster.settings import load, to_json
from aimaster.wire.codec import decode, encode
from aimaster.wire.health import REFUSED, read_refusal
from aimaster.wire.ids import Incarnation, MemberId
from aimaster.wire.messages import DeathNotice
from aimaster.wire.rollout import CompleteReply, CompleteRequest, Completion, LeaseReply, LeaseRequest, Piece
from aimaster.wire.topology import EpochProposal
from aimaster.wire.training import Committed, Fresh, Reduce, Turn, Wait, Word
from rl_runtime.controller.audit import audit
from rl_runtime.controller.ledger import read_ledger
from rl_runtime.records import Admitted
from tests.fakes.policy_arena import Memory, SimMember

SECRETS = {"read": "a" * 32, "operate": "b" * 32, "member": "c" * 32}
JOB = """
[train]
max_num_steps = {steps}
train_batch_per_replica = 4
compile = false
param_dtype = "float32"
[train.train_policy]
type = "grpo"
mini_batch = 1
allowed_outdated_steps = 1
reward_function = "exact"
[rollout]
n_generation = 2
max_response_length = 7
[rollout.parallelism]
tp_size = 1
[policy]
model_max_length = 32
[policy.parallelism]
n_init_replicas = {members}
tp_size = 1
[aimaster]
engine = "tiny"
task = "sort6"
[aimaster.model]
"""


class Controller:
    """A run folder and the process that serves it."""

    def __init__(self, run, *, steps=8, members=2):
        self.run = run
        run.mkdir()
        job = run / "job.toml"
        job.write_text(JOB.format(steps=steps, members=members))
        (run / "resolved.json").write_bytes(to_json(load(str(job), [], {})))
        token = run / "token"
        token.touch(0o600)
        token.write_text("".join(f"{role}={secret}\n" for role, secret in SECRETS.items()))
        self.process = None
        self.starts = 0

    def start(self):
        before = self.read_address()
        environment = os.environ | {"AIMASTER_RUN_DIR": str(self.run), "AIMASTER_INCARNATION": str(self.starts)}
        with (self.run / "output.log").open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rl_runtime.launch", "controller"], env=environment, stdout=output, stderr=output
            )
        self.starts += 1
        self.until(lambda: self.read_address() not in (None, before) or self.process.poll() is not None)
        return self

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def read_address(self):
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.run / "controller.json").read_bytes())["url"]
        return None

    @staticmethod
    def until(wanted, seconds=30.0):
        deadline = time.monotonic() + seconds
        while not wanted():
            assert time.monotonic() < deadline, "it did not come about"
            time.sleep(0.01)

    def ask(self, method, path, body=None, *, role="member"):
        """One request; returns status and body."""
        host, port = self.read_address().removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=10)
        try:
            headers = {"Authorization": f"Bearer {SECRETS[role]}"} if role else {}
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def answer(self, path, record, kind, stop=lambda: False):
        """Ask until answered."""
        while not stop():
            with contextlib.suppress(OSError, http.client.HTTPException):
                status, content = self.ask("POST", path, encode(record))
                if status == 200:
                    return decode(content, kind)
                assert status >= 500, content
            time.sleep(0.02)
        raise TimeoutError

    def status(self):
        return json.loads(self.ask("GET", "/v1/status", role="read")[1])


@contextlib.contextmanager
def started(run, **how):
    """A controller that serves, and is gone afterwards."""
    one = Controller(run, **how)
    try:
        yield one.start()
    finally:
        one.kill()


@pytest.fixture
def controller(tmp_path):
    with started(tmp_path / "run") as one:
        yield one


class World:
    """Threads that play members and workers against a real controller; what the arena is to the pure parts."""

    def __init__(self, controller, *, members=2, workers=2):
        self.controller = controller
        self.random = SimpleNamespace(random=lambda: 0.0)  # every save finds a free slot
        self.memories = {MemberId(f"policy-{number}"): Memory() for number in range(members)}
        self.meetings = {}
        self.lock = threading.Condition()
        self.acknowledged = set()
        self.sums = {}
        self.errors = []
        self.settings = SimpleNamespace(n_generation=2)
        self.members = {name: SimMember(name, Incarnation(0), self) for name in self.memories}
        self.threads = [threading.Thread(target=self.guard, args=(self.play, name)) for name in self.memories]
        self.threads += [threading.Thread(target=self.guard, args=(self.roll, f"rollout-{n}")) for n in range(workers)]
        self.over = False

    # what SimMember asks of its arena
    def candidates(self, member):
        return [snapshot.candidate("shm") for snapshot in self.memories[member.name].snapshots]

    def find(self, member, version):
        return next((s for s in reversed(self.memories[member.name].snapshots) if s.version == version), None)

    def find_held(self, version, digest):
        every = [s for memory in self.memories.values() for s in memory.snapshots]
        return next((s for s in every if (s.version, s.digest) == (version, digest)), None)

    def flush(self, snapshot):
        pass

    def check_sum(self, word: Committed, digest, total):
        assert digest
        assert max(total.values()) == 1
        with self.lock:
            assert self.sums.setdefault(word.version, dict(total)) == dict(total)

    def enter(self, member, word: Reduce):
        """Meet the others; after a while without them the reduction is aborted."""
        with self.lock:
            meeting = self.meetings.setdefault((word.epoch, word.step), {})
            meeting[member.name] = [key for keys in member.in_hand.values() for key in keys]
            self.lock.notify_all()
            whole = self.lock.wait_for(lambda: len(meeting) == word.world, timeout=5.0)
            total = Counter(key for keys in meeting.values() for key in keys)
        if whole:
            member.busy = word
            member.reduced(total)
        else:
            member.aborted()

    def guard(self, play, name):
        try:
            play(MemberId(name))
        except TimeoutError:
            pass
        except BaseException as error:
            self.errors.append(error)
            raise

    def play(self, name):
        member = self.members[name]
        while not member.done:
            turn = member.turn()
            member.obey(self.controller.answer("/v1/turn", turn, Word, lambda: self.over))
            if member.busy is not None:
                member.work()

    def roll(self, name):
        holding = {}
        while True:
            head = self.newest()
            request = LeaseRequest(
                member=name, incarnation=Incarnation(0), node="n", version=head, capacity=4 - len(holding),
                holding=tuple(holding),
            )  # fmt: skip
            reply = self.controller.answer("/v1/rollout/lease", request, LeaseReply, lambda: self.over)
            if reply.stop:
                return
            self.offer = reply.offer or self.offer
            for lease_id in reply.dropped:
                holding.pop(lease_id, None)
            holding |= {lease.lease_id: lease for lease in reply.leases}
            if holding and self.offer is not None:
                self.complete(name, holding)
            else:
                time.sleep(0.01)

    offer = None

    def newest(self):
        return self.offer.version if self.offer is not None else None

    def complete(self, name, holding):
        leases = list(holding.values())[:2]
        version = self.offer.version
        completions = tuple(
            Completion(
                lease_id=lease.lease_id, prompt_id=lease.prompt_id, index=lease.index, prompt_tokens=(1, 2),
                piece=Piece(tokens=(3, lease.seed % 90), logprobs=(-1.0, -0.5), versions=(version, version)),
                text="", reward=float(lease.index), finish="stop",
            )
            for lease in leases
        )  # fmt: skip
        request = CompleteRequest(member=name, incarnation=Incarnation(0), completions=completions)
        reply = self.controller.answer("/v1/rollout/complete", request, CompleteReply, lambda: self.over)
        for lease, result in zip(leases, reply.results, strict=True):
            holding.pop(lease.lease_id)
            if result in ("admitted", "duplicate"):
                with self.lock:
                    self.acknowledged.add((lease.prompt_id, lease.index))

    def run(self, meanwhile, seconds=60.0):
        for thread in self.threads:
            thread.start()
        deadline = time.monotonic() + seconds
        try:
            while any(thread.is_alive() for thread in self.threads) and time.monotonic() < deadline:
                meanwhile()
        finally:
            self.over = True
            for thread in self.threads:
                thread.join(15.0)
        assert not self.errors, self.errors
        assert time.monotonic() < deadline, "the run did not end"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_controller_killed_again_and_again_loses_nothing(tmp_path, seed):
    """SIGKILL at seeded moments; members and workers find it again by themselves, every step is committed once, every
    acknowledged completion is in the ledger, and the audit finds nothing lost and nothing double.
    """
    dice = random.Random(seed)
    with started(tmp_path / "run", steps=120) as controller:
        world = World(controller)

        def disturb():
            time.sleep(dice.uniform(0.05, 0.3))
            if controller.starts < 6:
                controller.kill()
                controller.start()

        world.run(disturb)
        assert controller.starts >= 4
        report = audit(controller.run)
        assert report.ok, report
        assert (report.finished, report.steps, report.trained) == (True, 120, 120 * 8)
        recorded = {(r.prompt_id, r.index) for r in read_ledger(controller.run / "ledger") if isinstance(r, Admitted)}
        assert world.acknowledged <= recorded
        states = [member.state for member in world.members.values()]
        assert states[0] == states[1]
        assert len(states[0]) == 120


def test_a_stopped_controller_that_wakes_up_goes_on(controller):
    """SIGSTOP for longer than the members' patience, then SIGCONT: resent questions change nothing."""
    world = World(controller)
    stops = iter([True, True])

    def disturb():
        time.sleep(0.3)
        if next(stops, False):
            controller.process.send_signal(signal.SIGSTOP)
            time.sleep(0.7)
            controller.process.send_signal(signal.SIGCONT)

    world.run(disturb)
    assert audit(controller.run).ok


def test_a_full_disk_pauses_the_run_and_space_lets_it_go_on(tmp_path):
    """The limit is set on the running process from outside: turns say `disk full`, nothing is acknowledged, nothing lost."""
    with started(tmp_path / "run", steps=60) as controller:
        fill_up_and_make_room(controller)


def fill_up_and_make_room(controller):
    world = World(controller)
    seen = []

    def disturb():
        time.sleep(0.2)
        if seen:
            return
        size = sum(path.stat().st_size for path in (controller.run / "ledger").glob("*.journal"))
        if size < 3000:
            return
        old = resource.prlimit(controller.process.pid, resource.RLIMIT_FSIZE, (size + 50, resource.RLIM_INFINITY))
        controller.until(lambda: controller.status()["pulse"]["finding"] == "storage.full")
        before = controller.status()["pulse"]["step"]
        turn = Turn(member=MemberId("policy-9"), incarnation=Incarnation(0), node="n", version=None, stage=Fresh())
        word = decode(controller.ask("POST", "/v1/turn", encode(turn))[1], Word)
        assert isinstance(word, Wait)
        assert word.reason.startswith("disk full")
        assert controller.ask("GET", "/readyz", role=None)[0] == 503
        assert controller.status()["pulse"]["step"] == before
        seen.append(True)
        resource.prlimit(controller.process.pid, resource.RLIMIT_FSIZE, old)

    world.run(disturb)
    assert seen
    report = audit(controller.run)
    assert report.ok
    assert report.finished


def test_who_may_ask_what(controller):
    """Members' doors need the member's token, looking needs any, health and metrics none; a broken body is answered 400."""
    turn = encode(Turn(member=MemberId("policy-0"), incarnation=Incarnation(0), node="n", version=None, stage=Fresh()))
    assert controller.ask("POST", "/v1/turn", turn, role=None)[0] == 401
    assert controller.ask("POST", "/v1/turn", turn, role="read")[0] == 403
    assert controller.ask("POST", "/v1/turn", turn)[0] == 200
    assert controller.ask("GET", "/v1/status", role=None)[0] == 401
    assert controller.ask("GET", "/v1/status", role="read")[0] == 200
    for path in ("/healthz", "/readyz", "/metrics"):
        assert controller.ask("GET", path, role=None)[0] == 200
    status, content = controller.ask("POST", "/v1/turn", b"nonsense")
    assert status == 400
    assert "not understood" in json.loads(content)["error"]


def test_metrics_have_our_prefix_and_base_units(controller):
    """Every family is named rlruntime_ and has a help text."""
    text = controller.ask("GET", "/metrics", role=None)[1].decode()
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    assert {"rlruntime_samples_trained_total", "rlruntime_step", "rlruntime_ledger_bytes"} <= names
    assert all(name.startswith("rlruntime_") for name in names)


def test_deaths_and_proposals_over_http(controller):
    """A notice of a death that changes nothing is taken at once; a proposal for another epoch is refused with 409."""
    notice = DeathNotice(node="node-0", member=MemberId("rollout-0"), incarnation=Incarnation(0), at=0.0)
    assert controller.ask("POST", "/v1/deaths", encode(notice))[0] == 200
    proposal = EpochProposal(term=1, replaces=7, leave=(MemberId("policy-0"),), cause="x")
    status, content = controller.ask("POST", "/v1/epoch", encode(proposal))
    assert status == 409
    assert "epoch 0 is current" in json.loads(content)["error"]


def test_a_run_folder_begun_by_another_configuration_is_refused(controller):
    """The process ends with one line that names what differs."""
    controller.process.terminate()
    assert controller.process.wait(10) == 0
    text = (controller.run / "job.toml").read_text().replace("n_generation = 2", "n_generation = 4")
    (controller.run / "job.toml").write_text(text)
    (controller.run / "resolved.json").write_bytes(to_json(load(str(controller.run / "job.toml"), [], {})))
    controller.start()
    assert controller.process.wait(10) == REFUSED
    category, why = read_refusal((controller.run / "output.log").read_text())
    assert category == "app.config"
    assert "n_generation: 2 then, 4 now" in why


@pytest.mark.parametrize("damage", ["in the middle", "all of it"])
def test_a_damaged_ledger_is_refused_by_name(tmp_path, damage):
    """No restart loop and no beginning from zero: the last line names the file and what to do."""
    controller = Controller(tmp_path / "run")
    (controller.run / "ledger").mkdir()
    with Journal.open(controller.run / "ledger") as journal:
        for text in (b"one", b"two", b"three"):
            journal.append_now([text])
    (segment,) = (controller.run / "ledger").glob("*.journal")
    raw = segment.read_bytes()
    segment.write_bytes(raw.replace(b"two", b"TWO") if damage == "in the middle" else b"x" * len(raw))
    controller.start()
    assert controller.process.wait(10) == REFUSED
    category, why = read_refusal((controller.run / "output.log").read_text())
    assert category == "data.corrupt"
    assert str(segment) in why
    assert "restore the file" in why


def test_a_ledger_folder_that_was_removed_is_not_begun_again(tmp_path):
    """Storage has step 5 of this run: an empty ledger is a lost one, and says so."""
    controller = Controller(tmp_path / "run")
    (controller.run / "storage/policy/l000-s000000005-e001").mkdir(parents=True)
    controller.start()
    assert controller.process.wait(10) == REFUSED
    category, why = read_refusal((controller.run / "output.log").read_text())
    assert category == "data.corrupt"
    assert "step 5" in why


def test_it_starts_without_anything_heavy():
    """No torch, no numpy, no transformers: a restarted controller is back in a blink."""
    code = "import sys, rl_runtime.controller.serve; print([m for m in ('torch', 'numpy', 'transformers') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
