"""A labelled failure case as it happens: one real agent for each of its nodes, a real master, and the case's logs written line by line."""

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import aiohttp
from click.testing import CliRunner

from aimaster.cli.diagnose import diagnose
from tests.fakes.failure_cases import Case, lay_out
from tests.flow.agent_master import Run

PARTS = ("category", "culprit", "action")
WAIT_SECONDS = 60.0
"""Starting a handful of interpreters takes long on a busy machine."""
LINE_SECONDS = 0.002


def finished(case: Case, folder: Path) -> dict:
    """What `aimaster diagnose --json` says of the finished folder."""
    return json.loads(CliRunner().invoke(diagnose, [str(lay_out(case, folder)), "--json"]).stdout)


def said(verdict: dict) -> dict:
    """The parts of a verdict that must agree."""
    culprit = verdict.get("culprit") or {}
    return {
        "category": verdict["category"],
        "node": culprit.get("node"),
        "rank": culprit.get("rank"),
        "action": verdict["action"],
    }


class LiveCase:
    """Master and agents of one case; used as a context."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.logs = folder / "logs"
        self.nodes = sorted({log["node"] or "unknown" for log in case["logs"]})
        self.run = Run(folder / "run", nodes=self.nodes, kind="command")

    async def __aenter__(self) -> Self:
        self._start()
        self._session = aiohttp.ClientSession()
        for node in self.nodes:
            await self._until(lambda node=node: self._is_ready(node), f"the agent of {node}")
        return self

    def _start(self) -> None:
        words = [sys.executable, "-m", "aimaster.master.serve", "--run-dir", str(self.run.places.run)]
        with (self.run.places.run / "master.log").open("ab") as log:
            self.run.processes.append(subprocess.Popen(words, stderr=log))
        for node in self.nodes:
            (self.logs / node).mkdir(parents=True)
            told = {"AIMASTER_AGENT__LOG_PATHS": str(self.logs / node / "*"), "AIMASTER_AGENT__KERNEL_LOG": "none"}
            self.run.agent(node, **told)

    async def __aexit__(self, *_) -> None:
        await self._session.close()
        await asyncio.to_thread(self.run.close)

    async def _until(self, question, what: str) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not await question():
            assert time.monotonic() < deadline, f"waited {WAIT_SECONDS} s for {what}"
            await asyncio.sleep(0.02)

    async def _is_ready(self, node: str) -> bool:
        identity = self.run.places.node(node) / "agent.pid.json"
        if not identity.exists():
            return False
        url = json.loads(identity.read_text())["url"]
        async with self._session.get(f"{url}/readyz") as answer:
            return answer.status == 200

    async def write(self) -> None:
        """All logs line by line, as far along as each other."""
        files = []
        for log in self.case["logs"]:
            path = self.logs / (log["node"] or "unknown") / Path(log["file"]).name
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            files.append((descriptor, log["lines"]))
        places = [
            (number / len(lines), index) for index, (_, lines) in enumerate(files) for number in range(len(lines))
        ]
        waiting = [iter(lines) for _, lines in files]
        for _, index in sorted(places):
            os.write(files[index][0], (next(waiting[index]) + "\n").encode())
            await asyncio.sleep(LINE_SECONDS)
        for descriptor, _ in files:
            os.close(descriptor)

    async def verdict(self) -> dict:
        """The master's, once it knows of every byte."""
        written = sum(path.stat().st_size for path in self.logs.rglob("*") if path.is_file())
        url = json.loads(self.run.places.master.read_text())["url"]
        token = next(
            line.partition("=")[2]
            for line in self.run.places.token.read_text().splitlines()
            if line.startswith("read=")
        )
        found: dict = {}

        async def has_read() -> bool:
            async with self._session.get(f"{url}/v1/diagnosis", headers={"Authorization": f"Bearer {token}"}) as answer:
                found.update(await answer.json())
            return answer.status == 200 and found["read"]["bytes"] == written

        await self._until(has_read, "the master to know all logs")
        return found


async def both_ways(case: Case, folder: Path) -> tuple[dict, dict]:
    """What was said live, and of the finished folder."""
    async with LiveCase(case, folder) as live:
        await live.write()
        verdict = await live.verdict()
    return said(verdict), said(finished(case, folder / "finished"))
