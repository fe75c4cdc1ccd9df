"""The figures: what they are made of, and what the bench that is shipped prints"""

import json

import pytest
from click.testing import CliRunner

from easyckpt import bench, shm
from tests.bench.ckpt import __main__ as peers_bench
from tests.bench.ckpt import figures


def one_round(stall, *, restore, durable=None, wrong=""):
    save = {"stall": stall, "stall_cpu": stall, "save_cpu": 2 * stall, "durable": durable}
    return {
        "bytes": 2**30, "open_seconds": 1.0, "saves": [{**save, "stall": 9 * stall}, save, save], "extra_memory": 2.0,
        "restore": restore, "restore_cpu": restore, "restore_cold": 3 * restore, "wrong": wrong,
    }  # fmt: skip


def test_the_shipped_bench_compares_floor_and_engine_and_leaves_nothing_behind(tmp_path):
    before = set(shm.SHM.iterdir())
    done = CliRunner().invoke(
        bench.main, ["--gib", "0.01", "--rounds", "2", "--storage", str(tmp_path), "--json"], catch_exceptions=False
    )
    found = json.loads(done.stdout)
    assert len(found["lines"]) == 4
    assert all(line["floor_ms"] > 0 and line["ours_ms"] > 0 for line in found["lines"].values())
    assert not {path for path in set(shm.SHM.iterdir()) - before if path.name.startswith("easyckpt-bench")}
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("argv", [
    ("--gib", "0"), ("--gib", "-1"), ("--gib", "nan"), ("--gib", "inf"), ("--rounds", "0"), ("--storage", "absent"),
])  # fmt: skip
def test_the_shipped_bench_refuses_what_cannot_be_measured(argv):
    """As a wrong use, before memory is taken."""
    done = CliRunner().invoke(bench.main, [*argv], catch_exceptions=False)
    assert done.exit_code == 2, done.output


def test_the_shipped_bench_refuses_a_state_that_memory_cannot_hold():
    """Instead of being killed in the middle; and nothing is left behind."""
    before = set(shm.SHM.iterdir())
    done = CliRunner().invoke(bench.main, ["--gib", "1000000"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "smaller --gib" in done.stderr
    assert not {path for path in set(shm.SHM.iterdir()) - before if path.name.startswith("easyckpt-bench")}


def test_the_bench_of_peers_refuses_a_place_that_is_not_there(capsys):
    """Before any engine is started."""
    with pytest.raises(SystemExit) as ended:
        peers_bench.main(["--work", "/absent"])
    assert ended.value.code == 2
    assert "/absent" in capsys.readouterr().err


def test_a_figure_is_a_ratio_of_medians_over_later_saves():
    """The first save of a process counts only in the figure about it."""
    results = {
        "Floor": [one_round(0.1, restore=0.2)], "OursMemory": [one_round(0.11, restore=0.22)],
        "Ours": [one_round(0.12, restore=0.3, durable=1.5)], "TorchSave": [one_round(2.0, restore=1.1, durable=3.0)],
    }  # fmt: skip
    overlap = {"stall_overlapped": 0.001, "copy_seconds": 0.1, "step_slowdown": 0.05}
    found = figures.of_one_process(results, overlap, [{"ours": 1.2, "raw": 0.8, "floor": 0.2, "wrong": ""}], 1)
    assert found["stall_copy_over_floor"] == 1.1
    assert found["first_over_later"] == 9.0
    assert found["durable_over_torch_save"] == 0.5
    assert found["torch_load_cold_over_restore_shm"] == 15.0
    assert found["restore_peer_over_socket_and_floor"] == 1.2
    assert found["stall_overlapped_ms_per_gib"] == 1.0


def test_an_engine_that_is_missing_or_failed_leaves_its_figures_out():
    results = {"Floor": [], "OursMemory": [one_round(0.1, restore=0.2)], "Ours": [{"error": "save failed"}]}
    found = figures.of_one_process(results, {}, [], 1)
    assert found["stall_copy_over_floor"] is None
    assert found["durable_cpu_seconds_per_gib"] is None
    assert found["wrong_restores"] == 0


def test_a_torn_restore_is_counted():
    results = {"OursMemory": [one_round(0.1, restore=0.2, wrong="w is torn or stale")], "Ours": []}
    found = figures.of_one_process(results, {}, [], 1)
    assert not figures.targets(1)["wrong_restores"].is_met(found["wrong_restores"])


def test_larger_states_have_harder_targets():
    assert figures.targets(4)["stall_copy_over_dcp_default"].limit == 0.2
    assert not figures.targets(4)["torch_load_over_restore_shm"].is_met(3.5)
    assert figures.targets(1)["torch_load_over_restore_shm"].is_met(3.5)
