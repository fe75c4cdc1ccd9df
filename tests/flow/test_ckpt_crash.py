"""Crash consistency: SIGKILL of the trainer, its agent, or both, in every phase of saving, sealing, copying, flushing and deleting."""

import json

import pytest

from tests.flow.ckpt_crash import Crash
from tests.flow.ckpt_phases import PHASES


async def crash(folder, *, kills, seed, slots=2):
    it = Crash(folder, seed, slots)
    try:
        await it.kill(kills)
    finally:
        it.close()
    print(json.dumps(it.figures.as_json()))
    assert it.figures.torn == []
    assert it.figures.wrong == []
    assert it.figures.steps > 0
    return it.figures


async def test_whatever_is_killed_the_newest_whole_step_loads_with_every_element_its_own(tmp_path):
    figures = await crash(tmp_path, kills=4, seed=8)
    assert len({victim for victim, _ in figures.kills}) == 3
    assert sum(figures.restored.values()) == 5


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("slots", [2, 3])
async def test_two_hundred_kills_in_every_phase_lose_nothing(tmp_path, slots):
    """And one, two or three of trainer, agent and memory: never a mixture, never behind what memory had promised."""
    figures = await crash(tmp_path, kills=200, seed=20, slots=slots)
    assert sum(figures.kills.values()) == 200
    assert {phase for _, phase in figures.caught} >= set(PHASES)
