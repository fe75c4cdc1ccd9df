"""The eyes in the whole agent: a fault is inflicted at its lowest boundary and the finding is seen at the master."""

import json
import os
import re
import subprocess
import sys
import urllib.request

import pytest

from aimaster.wire.messages import Found
from tests.fakes import fake_nvml
from tests.flow.agent_master import QUICK, Master, Run, member, until
from tests.flow.memory_group import EATING, MemoryGroup


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.close()


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not fake_nvml.has_compiler():
        pytest.skip("gcc is not installed: the fake NVML cannot be built")
    return fake_nvml.build(tmp_path_factory.mktemp("nvml"))


def found(master, **fields):
    return next(
        (one.finding for one in master.events(Found) if all(getattr(one.finding, n) == v for n, v in fields.items())),
        None,
    )


async def test_gpus_and_kernel_are_seen(run, library, tmp_path):
    """An Xid is told within the event, once from driver and kernel log together; a lost GPU, a hang and a lost NVLink follow."""
    driver = fake_nvml.FakeNvml(library, tmp_path / "nvml")
    driver.set(count=8)
    log = tmp_path / "kern.log"
    log.write_text("kernel: NVRM: Xid (PCI:0000:10:00): 79, pid=1, of an earlier boot\n")
    run.agent(**driver.environment, AIMASTER_AGENT__KERNEL_LOG=str(log), AIMASTER_AGENT__CALL_SECONDS="1")
    async with Master(run) as master:
        await master.connected("node-0")
        await until(lambda: (p := master.pulses.get("node-0")) and [r for r in p.readings if r.kind == "gpu.device"])
        driver.xid(48, gpu=3)
        one = await until(lambda: found(master, sign="nvml.xid"))
        assert (one.category, one.subject.gpu, one.node) == ("gpu.ecc", "0000:13:00", "node-0")
        with log.open("a") as file:
            file.write(
                "kernel: NVRM: Xid (PCI:0000:13:00): 48, pid=7, name=python, An uncorrectable double bit error\n"
            )
            file.write("kernel: EXT4-fs (md0): Remounting filesystem read-only\n")
        await until(lambda: found(master, category="node.disk_fault"))
        driver.set(gpu1__lost=1, gpu2__nvlink_down=2)
        await until(lambda: found(master, sign="nvml.lost"))
        assert len([one for one in master.events(Found) if one.finding.details.get("xid")]) == 1
        driver.set(gpu4__hang_ms=20_000)
        hang = await until(lambda: found(master, sign="nvml.hang"))
        assert (hang.severity, hang.weight < 50) == ("warning", True)
        driver.set(gpu4__hang_ms=0)
        url = master.hellos[-1].url
        page = await until(lambda: (text := metrics_of(url)) and 'aimaster_node_gpu_up{gpu="7"} 1.0' in text and text)
        assert 'aimaster_node_gpu_xid_total{gpu="3",xid="48"} 1.0' in page
        assert 'aimaster_node_source_active{source="file"} 1.0' in page
        assert 'aimaster_node_gpu_up{gpu="1"} 0.0' in page
        series = [line for line in page.splitlines() if not line.startswith("#")]
        assert len(series) < 2000
        assert not re.search(r"\b(?:pid|rank|step|path)=", page)


def metrics_of(url):
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        return answer.read().decode()


async def test_a_real_oom_kill_explains_the_death(run, tmp_path):
    """The kernel kills a member at its group's limit: the group's counter is told, and goes with the end of the member."""
    group = MemoryGroup(64 << 20)
    run.agent(AIMASTER_AGENT__KERNEL_LOG="none")
    try:
        async with Master(run) as master:
            go = tmp_path / "go"
            started = await master.start("node-0", member("policy-0", EATING.format(go=str(go))))
            group.put(started.process.pid)

            def kinds():
                return [
                    r.values.get("group", "") for r in master.pulses["node-0"].readings if r.kind == "cgroup.memory"
                ]

            await until(lambda: master.pulses.get("node-0") and any(group.folder.name in name for name in kinds()))
            go.touch()
            ended = await master.ended("policy-0")
            assert ended.signal == 9
            assert "node.oom_cgroup" in [one.category for one in ended.findings]
            told = await until(lambda: found(master, sign="cgroup.oom_kill"))
            assert told.details["members"] == "policy-0"
    finally:
        group.remove()


def test_once_prints_what_the_daemon_would_report(run, library, tmp_path):
    """`--once --json` asks the same sensors, the GPUs too, and names those that cannot read here with the reason."""
    driver = fake_nvml.FakeNvml(library, tmp_path / "nvml")
    command = [
        sys.executable,
        "-m",
        "agents.main",
        "--run-dir",
        str(run.places.run),
        "--node",
        "node-0",
        "--once",
        "--json",
    ]
    environment = os.environ | QUICK | driver.environment | {"AIMASTER_AGENT__KERNEL_LOG": "none"}
    seen = json.loads(subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60).stdout)
    assert {one["subject"].get("gpu") for one in seen["readings"] if one["kind"] == "gpu.device"} == {"0", "1"}
    assert seen["unsupported"]["kernel"] == "switched off"
    assert {"host", "mounts", "gpu"} <= {one["sensor"] for one in seen["readings"]}
