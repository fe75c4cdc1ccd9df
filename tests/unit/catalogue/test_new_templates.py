import pytest

from aimaster.catalogue import load
from aimaster.catalogue.templates import Piece, Templates, new_lines
from aimaster.cli.diagnose import examine

NOW = 1_772_400_000.0
STEPS = [f"2026-03-01 10:00:{s:02} INFO train: step={s} loss={s / 7:.3f}" for s in range(40)]
NOISE = [
    f"2026-03-01 10:00:{s:02} ERROR cache: failed to prefetch shard {s * 31} from host-{s}, using the slow path"
    for s in range(40)
]
ECHO = "torch.distributed.elastic.multiprocessing.api.SignalException: Process 31 got signal: 15"
STRANGE = "FATAL frobnicator: phase lock of oscillator 7 lost at 0x7f11aa22"


def write(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def judged(folder):
    return examine((str(folder),), load(), now=NOW).verdict


def test_lines_of_one_kind_are_one_template():
    """Numbers, paths and single words may differ; other words make another kind."""
    known = Templates()
    for line in NOISE[:5]:
        known.learn(line.encode())
    assert known.knows(NOISE[30].encode())
    assert known.knows(b"2026-03-01 11:22:33 ERROR cache: failed to prefetch shard 9 from spare, using the slow path")
    assert not known.knows(STRANGE.encode())


def test_only_lines_absent_before_are_offered():
    """An alarming line that earlier attempts printed too is not offered; the new one is."""
    before = [line.encode() for line in STEPS + NOISE]
    now = [(at, line.encode()) for at, line in enumerate([*NOISE, STRANGE])]
    assert [one.text for one in new_lines([Piece("n", "f", before, now)])] == [STRANGE]


@pytest.mark.parametrize("layout", ["folders", "rotated", "one file", "no earlier attempt"])
def test_an_unknown_failure_offers_what_is_new_in_this_attempt(tmp_path, layout):
    """Wherever the earlier attempts lie, the verdict is `unknown`, evicts nobody, and offers the new line alone."""
    first, second = STEPS + NOISE, [*STEPS, *NOISE, STRANGE, ECHO]
    if layout == "folders":
        write(tmp_path / "attempt_0" / "0" / "stderr.log", first)
        write(tmp_path / "attempt_1" / "0" / "stderr.log", second)
    elif layout == "rotated":
        write(tmp_path / "train.log.1", first)
        write(tmp_path / "train.log", second)
    elif layout == "one file":
        write(tmp_path / "train.log", [*first, "[launcher] restart 1", *second])
    else:
        write(tmp_path / "train.log", [*first, *second])
    verdict = judged(tmp_path)
    assert (verdict.category, verdict.action, verdict.culprit.node) == ("unknown", "restart_process", None)
    assert verdict.confidence <= 0.3
    assert [one.text for one in verdict.candidates] == [STRANGE]


def test_what_the_first_attempt_said_too_is_no_candidate(tmp_path):
    """The strange line stood in the attempt before, which went on: it is not what is new."""
    write(tmp_path / "attempt_0" / "train.log", [*STEPS, STRANGE, *STEPS])
    write(tmp_path / "attempt_1" / "train.log", [*STEPS, STRANGE, ECHO])
    assert judged(tmp_path).candidates == ()


def test_of_a_large_log_only_the_ends_are_read_again(tmp_path, monkeypatch):
    """The middle of a plain file is not read a second time; the new line at its end is found all the same."""
    monkeypatch.setattr("aimaster.cli.diagnose_candidates.LEARNT_BYTES", 20_000)
    write(tmp_path / "train.log", [*STEPS * 300, *NOISE * 300, *NOISE, STRANGE, ECHO])
    write(tmp_path / "other.log", NOISE)
    assert [one.text for one in judged(tmp_path).candidates] == [STRANGE]
