import json
import os
import signal
import socket
import subprocess
import sys

import aiohttp
import pytest

from aimaster.wire.messages import HangSuspected
from tests.bench.agent_rest import measure
from tests.flow.agent_master import BEATING, Master, Run, member, until


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    yield run
    run.close()


async def test_the_agent_and_its_shims_stay_small():
    """Agent and three shims at rest: PSS under 64 MiB together."""
    figures = await measure(seconds=0.5, members=3, settle_seconds=1.0)
    assert figures["pss_mib"] < 64


@pytest.mark.long
async def test_the_agent_rests():
    """At rest, over a minute: agent and shims take less than a hundredth of a core, and memory stays where it was."""
    figures = await measure(seconds=60, members=3)
    assert figures["cpu_ratio"] < 0.01
    assert figures["pss_mib"] < 64


async def test_a_fenced_member_is_a_hang(run):
    """A member that ended itself by its fence: exit code 1 with a finding that says hang, so that nobody takes it for an exception."""
    code = """
import ctypes, os
from aimaster.client import start_member
progress = start_member(group_timeout_seconds=0.05)
progress.beat("compute", step=3)
never, _ = os.pipe()
ctypes.PyDLL(None).read(never, ctypes.create_string_buffer(1), 1)
"""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", code, startup_hang_seconds=0.5))
        ended = await master.ended("policy-0")
        assert (ended.exit_code, ended.signal) == (1, None)
        fence = next(finding for finding in ended.findings if finding.sign == "agent.self_fence")
        assert fence.category.startswith("hang.")
        assert "most recent call first" in fence.evidence[0].text


async def test_a_stopped_command_is_suspected_though_it_reports_nothing(run):
    """A wrapped command that never beats: silence is no suspicion, but a process stopped by a signal is."""
    run.agent()
    async with Master(run) as master:
        spec = member(
            "command-0", "import time; time.sleep(600)", role="command", reports_progress=False,
            startup_hang_seconds=0.2, lease_floor_seconds=0.3,
        )  # fmt: skip
        started = await master.start("node-0", spec)
        at = master.pulses["node-0"].at
        await until(lambda: master.pulses["node-0"].at > at + 1.0)
        assert master.events(HangSuspected) == []
        os.kill(started.process.pid, signal.SIGSTOP)
        suspected = await until(lambda: master.events(HangSuspected))
        assert "state-T-twice" in suspected[0].evidence


async def test_metrics_and_readiness_are_open(run):
    """/metrics, /healthz and /readyz need no token on loopback; ready means that a master has accepted the agent."""
    run.agent()
    identity = run.places.node("node-0") / "agent.pid.json"
    await until(lambda: identity.exists() and identity.read_text())
    url = json.loads(identity.read_text())["url"]
    async with aiohttp.ClientSession(url) as session:
        assert (await session.get("/readyz")).status == 503
        assert (await session.get("/healthz")).status == 200
        assert (await session.get("/v1/snapshots")).status == 401
        async with Master(run) as master:
            started = await master.start("node-0", member("policy-0", BEATING))
            assert (await session.get("/readyz")).status == 200
            os.kill(started.process.pid, signal.SIGKILL)
            await master.ended("policy-0")
            text = await (await session.get("/metrics")).text()
    assert 'aimaster_node_member_exits_total{outcome="died",role="policy"} 1.0' in text
    assert "aimaster_node_master_connected 1.0" in text
    assert "aimaster_node_memory_available_bytes" in text
    assert "policy-0" not in text


async def test_once_prints_what_the_daemon_would_report(run):
    """--once --json reads members, segments and sensors and changes nothing; without --json it is a table for people."""
    run.agent()
    async with Master(run) as master:
        started = await master.start("node-0", member("policy-0", BEATING))
        words = [sys.executable, "-m", "agents.main", "--run-dir", str(run.places.run), "--node", "node-0", "--once"]
        out = subprocess.run([*words, "--json"], capture_output=True, text=True, check=True, timeout=30)  # noqa: ASYNC221
        seen = json.loads(out.stdout)
        assert [(one["member"], one["alive"]) for one in seen["members"]] == [("policy-0", True)]
        assert seen["members"][0]["process"]["pid"] == started.process.pid
        assert {reading["kind"] for reading in seen["readings"]} >= {"host.memory", "host.room", "process.usage"}
        out = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30)  # noqa: ASYNC221
        assert "policy-0" in out.stdout


async def test_the_socket_describes_the_node(run):
    """GET /v1/node on the node's own socket: members, snapshots, peers, for whoever works on the node."""
    run.agent()
    async with Master(run) as master:
        await master.start("node-0", member("policy-0", BEATING))
        connector = aiohttp.UnixConnector(path=str(run.memory() / "agent.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            seen = await (await session.get("http://agent/v1/node")).json()
        assert seen["node"] == "node-0"
        assert [one["member"] for one in seen["members"]] == ["policy-0"]
        assert (run.memory().stat().st_mode & 0o777) == 0o700


async def test_a_port_in_use_is_said_in_one_line(run):
    """--port of somebody else: exit code 2 and one sentence."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = [
            sys.executable,
            "-m",
            "agents.main",
            "--run-dir",
            str(run.places.run),
            "--node",
            "node-0",
            "--port",
            port,
        ]
        out = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)  # noqa: ASYNC221
    assert out.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in out.stderr
    assert "Traceback" not in out.stderr
