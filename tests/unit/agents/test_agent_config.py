"""What the agent is told of itself."""

import msgspec
import pytest

from agents.config import Whereabouts, read_keeping, read_pace
from aimaster.wire.places import RunPlaces


def test_labels_are_failure_domains_widest_first(tmp_path):
    labels = {"AIMASTER_AGENT__LABELS": " zone=a, rack=r7,switch=s3 "}
    assert list(read_keeping(RunPlaces(tmp_path), labels).labels.items()) == [
        ("zone", "a"),
        ("rack", "r7"),
        ("switch", "s3"),
    ]
    assert read_keeping(RunPlaces(tmp_path), {}).labels == {}


@pytest.mark.parametrize("text", ["rack", "rack=", "=r1", "rack=r1,rack=r2", "rack=r1,switch"])
def test_labels_that_are_none_are_refused(text):
    with pytest.raises(msgspec.ValidationError, match="NAME=VALUE"):
        Whereabouts(labels=text).domains()


def test_an_unknown_name_is_refused():
    with pytest.raises(msgspec.ValidationError, match="LABEL"):
        read_pace({"AIMASTER_AGENT__LABEL": "rack=r1"})
