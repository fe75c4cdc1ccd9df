"""Kills trainer, agent or both, each time in a chosen phase of keeping a snapshot, and judges what is left from the outside.

A round: a trainer restores and saves under a real agent, which copies each step to another node's agent and flushes every third to storage. In
the middle of a phase the victim gets SIGKILL. Then every sealed segment and every manifest is read against its digests, here, by no part of what was
killed: the newest version that is whole in any tier is what the next trainer must restore, with every element of that step and no other.
"""

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from easyckpt import shm, storage
from easyckpt.errors import BadSegment, EasyckptError, Torn
from easyckpt.flush import verify_stored
from tests.flow.agent_master import QUICK, Master, Run, until
from tests.flow.ckpt_crash_trainer import ACCEPTED, BEGUN, HELD, REPORT, RESTORED, WRONG
from tests.flow.ckpt_phases import OF_AGENT, OF_TRAINER, PHASES, Board

HERE = Path(__file__).resolve().parent
VICTIMS = ("trainer", "agent", "both")
AIM_SECONDS = {"save": 0.003, "seal": 0.0003, "replicate": 0.006, "flush": 0.02, "commit": 0.006, "retention": 0.002}
"""How far into a phase a kill comes at most: about as long as the phase takes, or a little longer."""
PHASE_SECONDS = 60.0


@dataclass
class Figures:
    """What the kills came to."""

    kills: Counter = field(default_factory=Counter)
    """By victim and aimed phase."""
    caught: Counter = field(default_factory=Counter)
    """By victim and each phase that was going on at the very kill; "none" where it had just ended."""
    restored: Counter = field(default_factory=Counter)
    """Always the newest whole step of all tiers; against the save that was on its way: that very one, the one before, or an older one (its slot
    was being copied away, memory had said so before)."""
    torn: list = field(default_factory=list)
    """Sealed segments or manifests that do not prove themselves."""
    wrong: list = field(default_factory=list)
    """Restores of another version than the newest whole one, of a mixture, or behind what memory had promised."""
    steps: int = 0

    def as_json(self):
        def flat(counter):
            return {" ".join(key) if isinstance(key, tuple) else key: count for key, count in sorted(counter.items())}

        return {
            "kills": sum(self.kills.values()), "by_victim_and_aim": flat(self.kills), "caught_in": flat(self.caught),
            "restored": flat(self.restored), "torn": self.torn, "wrong": self.wrong, "steps": self.steps,
        }  # fmt: skip


class Trainers:
    """The process that forks trainers; one lives at a time."""

    def __init__(self, board):
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "ckpt_crash_trainer.py"), str(board)],
            env={**os.environ, "PYTHONPATH": str(HERE.parents[1])},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout.readline() == "ready\n"

    def start(self, task):
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def reap(self):
        assert self._process.stdout.readline() == "ended\n"

    def close(self):
        self._process.kill()
        self._process.communicate(timeout=10)


class Crash:
    """Two nodes, a storage, and the rounds."""

    def __init__(self, folder, seed, slots=2):
        self._slots = slots
        self.run = Run(folder / "run", nodes=("node-0", "node-1"))
        self.figures = Figures()
        self._chance = random.Random(seed)
        self._board_path = folder / "board"
        self._board = Board(self._board_path)
        self._reports = folder / "reports"
        self._trainers = Trainers(self._board_path)
        self._agent = None

    def close(self):
        self._trainers.close()
        self.run.close()

    async def kill(self, rounds):
        """As many kills, then one last restore; then the node's memory is lost, and what the peer and storage have is restored."""
        self.run.agent("node-1")
        async with Master(self.run) as self._master:
            await self._master.connected("node-1")
            expected, promised, begun = 0, 0, []
            for number in range(rounds + 1):
                await self._agent_is_there()
                last = number == rounds
                pid = await asyncio.to_thread(self._start, only_restore=last)
                step = await self._restored(number, expected, promised, begun)
                if not last:
                    await self._strike(pid)
                await asyncio.to_thread(self._trainers.reap)
                said = self._said()
                taken = {value for kind, value in said if kind == ACCEPTED} | {self._last(said, BEGUN, step)}
                begun = [step, *(value for kind, value in said if kind == BEGUN and value in taken)]
                promised = self._last(said, HELD, step)
                expected = self._newest_whole(number)
            await self._lose_memory(expected)
        self.figures.steps = expected

    # -- a round -----------------------------------------------------------------------------------------------------

    async def _agent_is_there(self):
        if self._agent is not None and self._agent.poll() is None:
            return
        known = sum(hello.node == "node-0" for hello in self._master.hellos)
        self._start_agent()
        await until(lambda: sum(hello.node == "node-0" for hello in self._master.hellos) > known, 60)
        await self._master.introduce(("node-0", "node-1"))

    def _start_agent(self):
        self._board.clear(OF_AGENT)
        words = ["-m", "tests.flow.ckpt_phases", "--run-dir", str(self.run.places.run), "--node", "node-0"]
        self.run.places.node("node-0").mkdir(parents=True, exist_ok=True)
        environment = os.environ | QUICK | {"CKPT_BOARD": str(self._board_path), "PYTHONPATH": str(HERE.parents[1])}
        with (self.run.places.node("node-0") / "agent.log").open("ab") as log:
            self._agent = subprocess.Popen(
                [sys.executable, *words], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self.run.processes.append(self._agent)

    def _start(self, *, only_restore):
        self._board.clear(OF_TRAINER)
        self._reports.unlink(missing_ok=True)
        return self._trainers.start(
            {
                "storage": str(self.run.places.storage), "folder": str(self.run.segments()), "reports": str(self._reports),
                "agent": str(self.run.memory() / "agent.sock"), "peer": self._master.shards("node-1"),
                "token": self.run.token, "only_restore": only_restore, "slots": self._slots,
            }
        )  # fmt: skip

    async def _restored(self, number, expected, promised, begun):
        """What the trainer says that it restored, judged."""
        said = await until(
            lambda: [one for one in self._said() if one[0] in (RESTORED, WRONG)], 60, "the trainer to restore"
        )
        kind, step = said[0]
        if kind == WRONG or step != expected or step < promised:
            self.figures.wrong.append((number, step, expected, promised, kind == WRONG))
        if number:
            place = begun[::-1].index(step) if step in begun else len(begun)
            self.figures.restored[("newest", "one before")[place] if place < 2 else "older"] += 1
        return step

    async def _strike(self, pid):
        victim, phase = self._chance.choice(VICTIMS), self._chance.choice(PHASES)
        delay = self._chance.uniform(0, AIM_SECONDS[phase])
        first = self._chance.random() < 0.5
        await until(lambda: self._last(self._said(), ACCEPTED, 0), 60, "a save")
        agent = self._agent.pid
        targets = {"trainer": [pid], "agent": [agent], "both": [pid, agent][:: 1 if first else -1]}[victim]
        caught = await asyncio.to_thread(self._aim_and_kill, phase, delay, targets)
        self.figures.kills[victim, phase] += 1
        for one in caught or ("none",):
            self.figures.caught[victim, one] += 1
        if agent in targets:
            self._agent.wait(timeout=10)
        if pid not in targets:
            # Training goes on without its agent and with the next one; then it is killed as well, to see what is left.
            seen = len([kind for kind, _ in self._said() if kind == ACCEPTED])
            await self._agent_is_there()
            await until(
                lambda: len([kind for kind, _ in self._said() if kind == ACCEPTED]) > seen + 1, 60, "more saves"
            )
            os.kill(pid, signal.SIGKILL)

    def _aim_and_kill(self, phase, delay, targets):
        give_up_at = time.monotonic() + PHASE_SECONDS
        while not self._board.is_in(phase):
            assert time.monotonic() < give_up_at, f"nothing was seen in phase {phase}"
            if phase not in OF_TRAINER:
                time.sleep(0.0001)  # the others are too short for it
        strike_at = time.monotonic() + delay
        while time.monotonic() < strike_at:
            pass  # less than a sleep can be trusted with
        caught = self._board.now()
        for target in targets:
            os.kill(target, signal.SIGKILL)
        return caught

    # -- judging -----------------------------------------------------------------------------------------------------

    def _said(self):
        try:
            raw = self._reports.read_bytes()
        except FileNotFoundError:
            return []
        whole = len(raw) // REPORT.size * REPORT.size
        return [REPORT.unpack_from(raw, at) for at in range(0, whole, REPORT.size)]

    @staticmethod
    def _last(said, kind, default):
        return next((value for one, value in reversed(said) if one == kind), default)

    def _newest_whole(self, number):
        """The newest version that proves itself in any tier, found without the engine that was killed."""
        good = {0}
        for node in ("node-0", "node-1"):
            for path in self.run.segments(node).glob("*.safetensors"):
                good |= self._proven(number, path)
        for record in storage.list_manifests(self.run.places.storage, "policy"):
            try:
                verify_stored(self.run.places.storage, record)
                good.add(record.step)
            except FileNotFoundError:
                pass  # retention takes it away just now
            except EasyckptError as error:
                self.figures.torn.append((number, f"storage step {record.step}", str(error)))
        return max(good)

    def _proven(self, number, path):
        for _ in range(20):
            try:
                return {shm.verify(path).header.step}
            except Torn:
                continue  # a living agent goes on writing there
            except BadSegment as error:
                if shm.peek(path) is not None:
                    self.figures.torn.append((number, path.name, str(error)))
                return set()
            except FileNotFoundError:
                return set()
        return set()

    async def _lose_memory(self, expected):
        """The node's segments are gone: the peer's copy, or storage, whichever is newer, is what comes back."""
        self._agent.kill()
        self._agent.wait(timeout=10)
        for path in self.run.segments().iterdir():
            path.unlink()
        left = self._newest_whole("memory lost")
        await self._agent_is_there()
        await asyncio.to_thread(self._start, only_restore=True)
        await self._restored("memory lost", left, 0, [expected])
        await asyncio.to_thread(self._trainers.reap)
