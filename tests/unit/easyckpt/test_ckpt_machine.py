"""Save, flush, replicate, lose, damage, go back and restore, in any order, against a model of what must be there."""

import contextlib
import itertools
import os
import shutil
import signal
import uuid
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from easyckpt import Checkpointer, memory, shm
from easyckpt.errors import Corrupt
from easyckpt.flush import Flusher
from easyckpt.replica import open_for_send, receive

ROOT = Path(f"/dev/shm/easyckpt-machine-{os.getpid()}")
QUIET = {"on_event": lambda _event: None}


@pytest.fixture(scope="module", autouse=True)
def _leave_no_memory():
    yield
    shutil.rmtree(ROOT, ignore_errors=True)


class Machine(RuleBasedStateMachine):
    """One member, its memory, a copy that comes and goes, a storage. The model: which versions must be readable, and with which value."""

    @initialize()
    def begin(self):
        self.root = ROOT / uuid.uuid4().hex
        self.folder, self.storage = self.root / "memory", self.root / "storage"
        self.value = {}  # version -> what its tensor holds
        self.flushed = set()
        self.rewinds = []  # (lineage that began, step it went back to)
        self.pins = []
        self.step, self.base, self.lineage = 0, 0, 0
        self.open()

    def open(self):
        self.engine = Checkpointer(self.storage, folder=self.folder, on_sealed=lambda _path, _header: None, **QUIET)

    def held(self):
        """Versions in memory that a read of the files proves: what is on the disk decides, not what the engine thinks."""
        found = set()
        for segment in shm.scan(self.folder):
            try:
                shm.verify(segment.path)
            except Corrupt:
                continue
            found.add(segment.header.version)
        return found

    def alive(self):
        """What is there, without what a lineage went back behind, as far as anything of that lineage is left to say so."""
        there = self.held() | self.flushed
        said = self.flushed | {
            segment.header.version for segment in shm.scan(self.folder)
        }  # a header tells, even of damaged tensors
        known = [(lineage, step) for lineage, step in self.rewinds if any(version[0] >= lineage for version in said)]
        return {one for one in there if not any(one[0] < lineage and one[1] > step for lineage, step in known)}

    @rule(number=st.integers(1, 10**6))
    def save(self, number):
        before = self.held()
        self.step += 1
        state = {"w": torch.full((20_000,), float(number)), "step": self.step}
        saved = self.engine.save(self.step, state, lineage=self.lineage)
        self.engine.wait()
        version = (self.lineage, self.step)
        if saved:
            self.value[version] = float(number)
            assert version in self.held()
        else:
            assert len(self.pins) >= 1
            assert self.held() == before

    @rule()
    def flush(self):
        flusher = Flusher(self.folder, self.storage, keep=2)
        try:
            record = flusher.flush_newest()
        except Corrupt:
            return
        if record is not None:
            self.flushed.add(record.version)
        stored = {
            candidate.version for candidate in Checkpointer.candidates(self.engine) if candidate.tier == "storage"
        }
        self.flushed = {version for version in self.flushed if self.on_storage(version)} | stored

    def on_storage(self, version):
        return any((self.storage / "trainer").glob(f"l{version[0]:03d}-s{version[1]:09d}-e*/manifest.json"))

    @precondition(lambda self: any(segment.tier == "shm" for segment in shm.scan(self.folder)))
    @rule()
    def replicate(self):
        segment = next(one for one in shm.scan(self.folder) if one.tier == "shm")
        try:
            receive(self.folder, open_for_send(segment.path)[2], segment.path.name)
        except Corrupt:
            assert segment.header.version not in self.held()

    @precondition(lambda self: self.pins == [] and shm.scan(self.folder))
    @rule()
    def pin(self):
        self.pins.append(shm.pin(shm.scan(self.folder)[0].path))

    @precondition(lambda self: self.pins)
    @rule()
    def unpin(self):
        shm.unpin(self.pins.pop())

    @rule(at=st.integers(0, 12), number=st.integers(1, 10**6))
    def die(self, at, number):
        """A trainer opens the same folder, saves the next step, and is killed (SIGKILL) at one of its copies and writes, or right after them.

        What was newest in memory is there still, or, if that was overwritten because another copy is pinned, the pinned one; the step that was
        being saved is there whole, or not at all.
        """
        before = {segment.header.version for segment in shm.scan(self.folder)}  # damage is not known before a read
        self.end_without_a_word()
        pid = os.fork()
        if pid == 0:
            self.be_killed(at, number)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        after = {segment.header.version for segment in shm.scan(self.folder)}
        new = (self.lineage, self.step + 1)
        if new in after:
            self.step += 1
            self.value[new] = float(number)
        if before:
            assert after
            assert max(before) in after or self.pins or new in after
        self.open()

    def end_without_a_word(self):
        """The engine of this process goes without closing: its mark and its memory stay as a killed one leaves them."""
        self.engine._saver.close(10)
        self.engine._closed = True
        for mark in self.folder.glob("*.writer.*"):
            mark.unlink()

    def be_killed(self, at, number):
        """In a process of its own; never returns."""
        count = itertools.count()

        def deadly(call):
            def counted(*args):
                if next(count) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args)

            return counted

        try:
            self.open()
            with contextlib.suppress(Corrupt):
                self.engine.restore({"w": torch.zeros(20_000), "step": 0})
            for owner, name in ((memory, "copy"), (memory, "copy_small"), (os, "pwrite")):
                setattr(owner, name, deadly(getattr(owner, name)))
            state = {"w": torch.full((20_000,), float(number)), "step": self.step + 1}
            self.engine.save(self.step + 1, state, lineage=self.lineage)
            self.engine.wait()
        finally:
            os.kill(os.getpid(), signal.SIGKILL)

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data())
    def damage_the_newest_copies(self, data):
        """A bit flips in every memory copy of the newest version."""
        newest = max(self.alive())
        if newest not in self.held() or self.pins:
            return
        for segment in shm.scan(self.folder):
            if segment.header.version == newest:
                at = data.draw(st.integers(segment.prefix_bytes, segment.nbytes - 1))
                with open(segment.path, "r+b") as file:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 0x10]))

    @precondition(lambda self: not self.pins)
    @rule()
    def lose_the_memory(self):
        for path in self.folder.glob("*.safetensors"):
            path.unlink()

    @precondition(lambda self: len(self.alive()) > 1)
    @rule(data=st.data())
    def go_back(self, data):
        """To any living version; what was above it, readable or not, is dead once the new lineage has saved."""
        version = data.draw(st.sampled_from(sorted(self.alive())))
        state = {"w": torch.zeros(20_000), "step": 0}
        assert self.engine.restore(state, at=version) is not None
        if version < (self.lineage, self.step):
            self.lineage += 1
            self.rewinds.append((self.lineage, version[1]))
        self.step = version[1]
        self.save(7)

    @invariant()
    def the_newest_living_version_loads_with_its_own_values(self):
        if not hasattr(self, "engine"):
            return
        state = {"w": torch.zeros(20_000), "step": 0}
        try:
            restored = self.engine.restore(state)
        except Corrupt:
            restored = None
        living = self.alive()
        if restored is None:
            assert not living
            return
        version = (restored.lineage, restored.step)
        assert version == max(living)
        assert state["w"].unique().tolist() == [self.value[version]]
        assert state["step"] == version[1]

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.close()
            shutil.rmtree(self.root, ignore_errors=True)


class LongMachine(Machine):
    """The same, for as long as `make test-long` gives it."""


SMALL = settings(max_examples=40, stateful_step_count=30, deadline=None, phases=[Phase.generate, Phase.shrink])
Machine.TestCase.settings = SMALL
LongMachine.TestCase.settings = settings(SMALL, max_examples=600)
TestMachine = Machine.TestCase
TestLongMachine = pytest.mark.long(pytest.mark.timeout(1800)(LongMachine.TestCase))
