"""Drills of a wrapped command that reports its steps: killed, stopped, and its node lost, each at its step."""

import json
import sys

import pytest

from tests.flow.jobs import job, processes_of, until

pytestmark = pytest.mark.timeout(120)

STEPS = """
import os, pathlib, time
from aimaster.client import report_progress

done = pathlib.Path(__file__).with_name("done")
step = int(done.read_text()) if done.exists() else 0
print("starts at", step, flush=True)
while step < 60:
    step += 1
    report_progress(step)
    done.write_text(str(step))
    time.sleep(0.05)
print("through", flush=True)
"""


def drilled(tmp_path, drills: str) -> tuple[dict, str]:
    """Run the script under drills to its end; its summary, and all that was said."""
    script = tmp_path / "train.py"
    script.write_text(STEPS)
    with job(tmp_path / "run", "--drill", drills, "--", sys.executable, str(script)) as one:
        assert one.wait(90) == 0, one.story()
        assert not processes_of(one.run)
        return json.loads(one.places.summary.read_bytes()), one.output.read_text()


def test_a_drill_is_shown_as_a_drill_and_costs_no_budget(tmp_path):
    """Killed at step 10 and stopped at step 30, the command goes on from its own state each time; the summary names both drills."""
    end, said = drilled(tmp_path, "kill:command-0@10,stop:command-0@30")
    assert [line["what"].split(".")[0] for line in end["incidents"]] == ["command-0 process", "command-0 hang"]
    assert all(line["drill"] and line["recovered_after_seconds"] > 0 for line in end["incidents"])
    assert "sent SIGKILL to command-0" in said
    assert "sent SIGSTOP to command-0" in said
    starts = [int(line.split()[-1]) for line in said.splitlines() if line.startswith("starts at")]
    assert len(starts) == 3
    assert starts == sorted(starts)
    assert end["drills_not_reached"] == []


def test_a_lost_node_is_replaced_by_an_empty_one(tmp_path):
    """All processes of the node are killed and its folders deleted: the agent comes back with nothing, the command is started there again."""
    end, said = drilled(tmp_path, "node:node-0@10")
    assert "killed its" in said
    assert "through" in said
    (incident,) = end["incidents"]
    assert incident["what"] == "node-0 node.lost (with it command-0)"
    assert incident["drill"]
    assert incident["recovered_after_seconds"] > 0


def test_a_drill_whose_step_never_comes_is_named(tmp_path):
    """What was not reached stands in the summary, for people too."""
    end, said = drilled(tmp_path, "kill:command-0@1000")
    assert end["drills_not_reached"] == ["kill:command-0@1000"]
    assert end["incidents"] == []
    until(lambda: "drill not reached" in said, "the summary names it", 1)
