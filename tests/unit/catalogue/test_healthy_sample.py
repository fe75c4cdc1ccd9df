"""The sample of healthy logs: lines of real jobs that ended well, of each kind that sounds like trouble. `make bench-healthy` scans a gigabyte."""

import pytest

from aimaster.catalogue import load
from aimaster.cli.diagnose import examine
from tests.corpus import measure
from tests.corpus.sample import DATA

FILES = sorted(DATA.glob("*.log"))
NOW = 1_796_000_000.0


@pytest.fixture(scope="module")
def catalogue():
    return load()


def test_the_sample_has_the_programs():
    """torchrun, Ray, MPI, Slurm, the project itself and others are in it."""
    assert {"torchrun-ddp", "ray", "open-mpi", "slurm", "aimaster"} <= {path.stem for path in FILES}
    assert sum(path.stat().st_size for path in FILES) < 1_500_000


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FILES])
def test_healthy_lines_raise_nothing_above_benign(catalogue, path):
    """No sign of failure, nor an echo of one, in what healthy programs print; and the verdict is that nothing is wrong."""
    assert measure.alarms(path.stem, measure.scan_file(catalogue, path, path.name)) == []
    verdict = examine((str(path),), catalogue, now=NOW).verdict
    assert (verdict.category, verdict.action) == ("benign", "ignore")
