"""What the agent is told of itself."""

from pathlib import Path

import msgspec
import pytest

from agents.config import Whereabouts, read_keeping, read_pace
from aimaster.settings import load
from aimaster.settings.render import to_json
from aimaster.wire.places import RunPlaces

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny.toml"


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


def test_copies_and_their_cap_come_from_the_configuration(tmp_path):
    flags = ["--aimaster.snapshots.copies", "2", "--aimaster.snapshots.copy_mib_per_second", "50"]
    places = RunPlaces(tmp_path)
    places.resolved.write_bytes(to_json(load(EXAMPLE, flags, {}, gpus=0)))
    keeping = read_keeping(places, {})
    assert (keeping.copies, keeping.copy_bytes_per_second) == (2, 50 * 2**20)


def test_an_unknown_name_is_refused():
    with pytest.raises(msgspec.ValidationError, match="LABEL"):
        read_pace({"AIMASTER_AGENT__LABEL": "rack=r1"})
