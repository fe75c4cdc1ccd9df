"""The audit counts anew, and finds what it should."""

import asyncio
import json
import subprocess
import sys

import msgspec
import pytest

from rl_runtime.controller.audit import Count, audit
from rl_runtime.controller.ledger import Ledger
from rl_runtime.records import Admitted, Committed, Dealt, Leased, Rewound
from tests.fakes.policy_arena import Arena, Memory, small_settings


def told(*, steps=8, disturbed=True, **changes):
    """The records of a run; disturbed: with deaths, a restore from storage and a replay."""
    arena = Arena(small_settings(steps=steps, **changes), seed=3)
    arena.run_until(lambda: arena.account.head.step >= 5)
    if disturbed:
        for name in list(arena.memories):
            arena.lose_node(name)
            arena.memories[name] = Memory()
    assert arena.run_fairly()
    assert not disturbed or arena.account.head.lineage > 0
    return arena


def counted(records, snapshots=()):
    count = Count()
    for record in records:
        count.take(record)
    return count.report(snapshots)


def test_a_disturbed_run_has_lost_and_doubled_nothing():
    """Deaths and replays leave every sample trained once."""
    arena = told()
    report = counted(arena.records)
    assert report.ok, report
    assert report.trained == report.dealt == 8 * 4
    assert report.admitted == report.trained + report.waiting
    assert report.rewinds >= 1
    assert report.finished


def test_filtered_groups_are_accounted_for():
    """Leased, admitted and filtered, never dealt."""
    arena = told(disturbed=False, filter_groups=True, steps=6)
    report = counted(arena.records)
    assert report.ok, report
    assert report.filtered > 0
    assert report.admitted == report.trained + report.waiting + report.filtered


def test_a_compacted_ledger_counts_the_same():
    """The account that compaction wrote stands for the records it sums up."""
    arena = told()
    whole = counted(arena.records)
    assert arena.account.floor > 0
    count = Count()
    count.begin_at(arena.account.copy())
    assert count.report(()) == whole


def first(records, kind, **wanted):
    return next(
        number
        for number, record in enumerate(records)
        if isinstance(record, kind) and all(getattr(record, name) == value for name, value in wanted.items())
    )


@pytest.mark.parametrize("fault", ["admitted twice", "dealt twice", "not admitted", "skipped", "chain", "never leased"])
def test_each_kind_of_fault_is_found(fault):
    """A ledger that was tampered with, or written by a broken controller, does not pass."""
    records = list(told(disturbed=False).records)
    match fault:
        case "admitted twice":
            place = first(records, Admitted)
            records.insert(place, records[place])
        case "dealt twice":
            one, two = first(records, Dealt, step=1), first(records, Dealt, step=3)
            records[two] = msgspec.structs.replace(records[two], prompts=records[one].prompts)
        case "not admitted":
            del records[first(records, Admitted)]
        case "skipped":
            del records[first(records, Committed, step=4)]
        case "chain":
            place = first(records, Committed, step=4)
            records[place] = msgspec.structs.replace(records[place], chain="0" * 32)
        case "never leased":
            del records[first(records, Leased)]
    report = counted(records)
    assert not report.ok
    if fault in ("admitted twice", "dealt twice"):
        assert report.duplicate > 0
    if fault in ("not admitted", "skipped"):
        assert report.lost > 0 or report.problems


def test_snapshots_must_carry_the_ledgers_chain():
    """One on the live path passes, one with another chain or of an unknown step does not; dead lineages are known as well."""
    arena = told()
    good = [
        ("segment", s.version.lineage, s.version.step, s.chain) for m in arena.memories.values() for s in m.snapshots
    ]
    good += [("storage", s.version.lineage, s.version.step, s.chain) for s in arena.storage]
    report = counted(arena.records, good)
    assert report.ok, report.problems
    assert report.snapshots == len(good)
    where, lineage, step, chain = good[0]
    assert not counted(arena.records, [(where, lineage, step, chain[::-1] + "0")]).ok
    assert not counted(arena.records, [(where, lineage, 99, chain)]).ok


def test_a_snapshot_taken_right_after_a_rewind_carries_the_old_chain():
    """Version (L, S) of a fresh lineage is the state of step S."""
    arena = told()
    rewind = next(record for record in arena.records if isinstance(record, Rewound))
    chain = next(
        record.chain for record in arena.records if isinstance(record, Committed) and record.step == rewind.step
    )
    assert counted(arena.records, [("segment", rewind.lineage, rewind.step, chain)]).ok


async def write_ledger(folder, records):
    ledger = Ledger.open(folder)
    writer = asyncio.create_task(ledger.run())
    for record in records:
        ledger.write(record)
    assert await ledger.durable(10.0)
    writer.cancel()
    ledger.close()


def test_the_audit_reads_a_run_folder_and_says_so_by_its_exit_code(tmp_path):
    """`python -m rl_runtime.controller.audit RUN --json` prints one document; 0 when all is well."""
    arena = told()
    asyncio.run(write_ledger(tmp_path / "ledger", arena.records))
    assert audit(tmp_path).trained == 32
    command = [sys.executable, "-m", "rl_runtime.controller.audit", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (report["ok"], report["lost"], report["duplicate"], report["trained"]) == (True, 0, 0, 32)


async def test_a_run_that_goes_on_passes_as_well(tmp_path):
    """What is dealt and not committed yet is neither lost nor trained; nobody has to stop for an audit."""
    arena = told(disturbed=False)
    place = first(arena.records, Committed, step=5)
    await write_ledger(tmp_path / "ledger", arena.records[:place])
    report = audit(tmp_path)
    assert report.ok
    assert not report.finished
    assert (report.trained, report.dealt) == (16, 20)
