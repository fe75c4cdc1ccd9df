"""Live and offline give the same verdict on the same evidence: each labelled case is replayed both ways."""

import random

import pytest

from tests.fakes.failure_cases import load_cases
from tests.flow.live_case import both_ways

CASES = load_cases("failure_cases.jsonl") + load_cases("own_cases.jsonl")
SEED = 4
FEW = random.Random(SEED).sample([case for case in CASES if len({log["node"] for log in case["logs"]}) == 2], 2)


async def agree(case, folder):
    live, offline = await both_ways(case, folder)
    assert live == offline, case["id"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in FEW])
async def test_a_few_cases_are_judged_alike_live_and_finished(case, tmp_path):
    """Lines that arrive one by one in logs that agents follow end in the verdict of `aimaster diagnose` on the folder."""
    await agree(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("case", [pytest.param(case, id=case["id"]) for case in CASES if case not in FEW])
async def test_every_case_is_judged_alike_live_and_finished(case, tmp_path):
    """All others of the handed and our own cases."""
    await agree(case, tmp_path)
