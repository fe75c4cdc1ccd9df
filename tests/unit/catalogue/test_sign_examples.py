import re

import pytest

from aimaster.catalogue import load, load_signs
from aimaster.catalogue.matcher import Catalogue
from aimaster.wire.health import CATEGORIES

SIGNS = load_signs()
MATCHES = [
    pytest.param(sign, text, id=f"{sign.id}+{number}") for sign in SIGNS for number, text in enumerate(sign.match)
]
NO_MATCHES = [
    pytest.param(sign, text, id=f"{sign.id}-{number}") for sign in SIGNS for number, text in enumerate(sign.no_match)
]


@pytest.fixture(scope="module")
def catalogue() -> Catalogue:
    return load()


@pytest.mark.parametrize(("sign", "text"), MATCHES)
def test_a_sign_matches_each_of_its_examples(catalogue, sign, text):
    """Each example line shows the sign, found through its literals as in a log."""
    assert sign.id in {match.sign.id for match in catalogue.match(text)}


@pytest.mark.parametrize(("sign", "text"), NO_MATCHES)
def test_a_sign_leaves_its_counterexamples_alone(catalogue, sign, text):
    """No counterexample shows the sign."""
    assert sign.id not in {match.sign.id for match in catalogue.match(text)}


@pytest.mark.parametrize("sign", [pytest.param(sign, id=sign.id) for sign in SIGNS])
def test_a_sign_is_complete(sign):
    """Every sign compiles, has a line that must and one that must not match, and a literal of its pattern in each example."""
    re.compile(sign.pattern.encode())
    assert sign.match
    assert sign.no_match
    for text in sign.match:
        assert any(literal in text for literal in sign.literal)


def test_sign_ids_are_unique():
    """Two signs never share an id: rules switch signs off by it."""
    ids = [sign.id for sign in SIGNS]
    assert len(ids) == len(set(ids))


def test_every_root_category_has_a_sign():
    """Each category of the taxonomy can be found in a log, by a sign or by the Xid table."""
    from_table = {"gpu.ecc_contained", "gpu.exec_fault", "gpu.nvlink"}
    spoken = {sign.category for sign in SIGNS if sign.role in ("self", "accusation")} | from_table
    made = {"app.retryable", "unknown", "benign", "hang.unknown"}  # by a user's rules, by exclusion, by numbers
    assert set(CATEGORIES) - spoken - made == set()


def test_both_searches_find_the_same(catalogue):
    """Without the fast search library the same signs are found."""
    slow = load(plain=True)
    for sign in SIGNS:
        for text in sign.match:
            assert [one.sign.id for one in slow.match(text)] == [one.sign.id for one in catalogue.match(text)] or {
                one.sign.id for one in slow.match(text)
            } == {one.sign.id for one in catalogue.match(text)}
