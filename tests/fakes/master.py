"""A run folder with a real master process and fake agents on the real line."""

import asyncio
import contextlib
import json
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest

from aimaster.wire import codec
from aimaster.wire.status import JobStatus
from aimaster.wire.topology import JobPlan, MemberSpec
from tests.fakes.agent import FakeAgent

WAIT_SECONDS = 20.0
SECRET = secrets.token_hex(16)


async def until(question: Callable[[], object | Awaitable[object]], what: str) -> None:
    """Ask until the answer is true, within the deadline."""
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        answer = question()
        if isinstance(answer, Awaitable):
            answer = await answer
        if answer:
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within {WAIT_SECONDS:.0f} s: {what}")


class Run:
    """A run folder, its master process and its agents."""

    def __init__(self, folder: Path, plan: JobPlan) -> None:
        self.folder, self.plan = folder, plan
        folder.mkdir(exist_ok=True)
        (folder / "plan.json").write_bytes(codec.encode_json(plan))
        token = folder / "token"
        token.write_text("".join(f"{role}={SECRET}{role}\n" for role in ("read", "operate", "member")))
        token.chmod(0o600)
        self.process: subprocess.Popen[bytes] | None = None
        self.agents = {node: FakeAgent(folder, plan.run_id, node, token=f"{SECRET}member") for node in plan.nodes}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start_master(self, *more: str) -> None:
        self._spawn(more)
        await until(self._announced_or_ended, "the master announces itself")

    def _announced_or_ended(self) -> bool:
        return (self.folder / "master.json").exists() or self.process.poll() is not None

    def _spawn(self, more: tuple[str, ...]) -> None:
        (self.folder / "master.json").unlink(missing_ok=True)
        argv = [sys.executable, "-m", "aimaster.master.serve", "--run-dir", str(self.folder), *more]
        with (self.folder / "master.log").open("ab") as log:
            self.process = subprocess.Popen(argv, stderr=log)

    def start_agents(self) -> None:
        for agent in self.agents.values():
            self._tasks.append(asyncio.create_task(agent.run(), name=f"agent {agent.node}"))

    async def ask(self, method: str, path: str, *, role: str = "operate", **how) -> aiohttp.ClientResponse:
        self._session = self._session or aiohttp.ClientSession()
        url = json.loads((self.folder / "master.json").read_bytes())["url"]
        headers = {"Authorization": f"Bearer {SECRET}{role}"} if role else {}
        reply = await self._session.request(
            method, url + path, headers=headers, timeout=aiohttp.ClientTimeout(total=5), **how
        )
        await reply.read()
        return reply

    async def status(self) -> JobStatus:
        return codec.decode_json(await (await self.ask("GET", "/v1/status")).read(), JobStatus)

    async def in_state(self, *states: str) -> bool:
        return (await self.status()).state in states

    async def running(self) -> None:
        await until(lambda: self.in_state("running"), "the job runs")

    def kill_master(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self._session is not None:
            await self._session.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()


def plan_of(
    members: dict[str, tuple[str, str]], *, kind: str = "rl", nodes: tuple[str, ...] = ("node-0", "node-1"), **more
) -> JobPlan:
    """A plan from member -> (role, node)."""
    specs = {name: MemberSpec(member=name, role=role, argv=("true",)) for name, (role, _) in members.items()}
    placement = {name: node for name, (_, node) in members.items()}
    return JobPlan(run_id="0badcafe", name="job", kind=kind, nodes=nodes, members=specs, placement=placement, **more)


RL = {
    "controller-0": ("controller", "node-0"),
    "policy-0": ("policy", "node-0"),
    "policy-1": ("policy", "node-1"),
    "rollout-0": ("rollout", "node-1"),
}
