"""The front process: the embedded engine of `aimaster run`. It keeps master and agents up, and ends the run with nothing left behind.

It decides nothing about the job; that is the master's. Its loop does six things in turn: heed signals, mind its programs, look at
the run, break what a drill wants broken, pass on a stop, and notice the end. Two ways out:

    finished or failed, says the master    -> agents end by the master's order, the master last
    Ctrl-C, SIGTERM, `aimaster stop`       -> the same after a flush; a second signal kills everything at once

Whatever the programs leave behind becomes a child of this process (subreaper) and is ended with it. Killed itself, it needs
nobody: master, agents and shims watch it and end by themselves, and the same command resumes.
"""

import contextlib
import os
import select
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from aimaster.cli.front_display import Display, IncidentTeller
from aimaster.cli.front_drills import Drill, Engine, due, inflict, step_of
from aimaster.cli.front_folder import RunFolder, write_atomically
from aimaster.cli.front_link import MasterLink, await_predecessors, child_ends, hung, tail
from aimaster.cli.front_output import OutputFollower
from aimaster.cli.front_signals import Signals
from aimaster.cli.front_summary import Outcome, Rewards, Summary, summarize
from aimaster.cli.front_supervise import Supervised
from aimaster.clusters.base import Cluster, Program
from aimaster.clusters.local import adopt_orphans, kill_descendants, reap_orphans
from aimaster.wire.ids import NodeId
from aimaster.wire.places import node_memory, segments
from aimaster.wire.status import JobStatus
from aimaster.wire.topology import JobPlan

TURN_SECONDS: Final = 0.2
LOOK_SECONDS: Final = 0.4
STOP_SECONDS: Final = 60.0
"""For flush and end of the members, before agents are told directly."""
TERMINATE_SECONDS: Final = 15.0
"""For an agent or the master after SIGTERM, before SIGKILL."""
KILLED_DRAIN_SECONDS: Final = 1.0
TOLD_DRAIN_SECONDS: Final = 3.0
ENDED: Final = ("finished", "failed")


class Front:
    """One start of one run."""

    def __init__(
        self,
        folder: RunFolder,
        plan: JobPlan,
        cluster: Cluster,
        display: Display,
        *,
        drills: Sequence[Drill] = (),
        port: int = 0,
        follower: OutputFollower | None = None,
    ) -> None:
        self._folder, self._plan, self._display = folder, plan, display
        self._places = folder.places
        self._link = MasterLink(self._places)
        self._token = self._places.token.read_bytes()
        self._teller = IncidentTeller(display)
        self._follower = follower
        self._rewards = Rewards(folder.info.reward_before)
        self._drills = list(drills)
        self._signals = Signals()
        self._master = Supervised(master_program(folder, port), cluster)
        self._agents = {
            node: Supervised(agent_program(folder, node, plan.node_env.get(node)), cluster) for node in plan.nodes
        }
        self._status: JobStatus | None = None
        self._looked_at = 0.0
        self._stop_reason = ""
        self._stop_accepted = False
        self._ending_since: float | None = None
        self._killed = False
        self._gave_up = ""

    # -- the run --------------------------------------------------------------------------------------------------------

    def drive(self) -> Summary:
        """Start everything, stay until the end, leave nothing; the summary."""
        began = time.monotonic()
        adopt_orphans()
        with self._signals:
            await_predecessors(self._places, self._display.note, self._signals)
            if self._follower is not None:
                self._follower.start()
            while not self._over(time.monotonic()):
                self._turn()
                self._sleep()
            self._wind_down()
        outcome, reason = self._outcome()
        return summarize(
            self._folder.info,
            self._places.run,
            outcome,
            reason,
            self._status,
            seconds=time.monotonic() - began,
            rewards=self._rewards.ends(),
            children=child_ends(self._plan, self._places),
            drills_not_reached=[str(drill) for drill in self._drills],
        )

    def _turn(self) -> None:
        now = time.monotonic()
        self._heed_signals()
        if any(agent.has_ended for agent in self._agents.values()):
            # It may have ended as the master told it to: that is to be known before it would be started again.
            self._looked_at = float("-inf")
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look(now)
        for program in (self._master, *self._agents.values()):
            program.mind(now, self._display.note)
            if program.given_up and not self._gave_up:
                self._gave_up = f"{program.program.name} cannot be kept up; the end of {program.program.log}:\n{tail(program.program.log)}"
        reap_orphans(self._pids())
        if self._stop_reason and not self._stop_accepted:
            self._stop_accepted = self._link.stop(self._stop_reason)

    def _sleep(self) -> None:
        """Until something of ours ends, a signal comes, or the turn is over."""
        poll = select.poll()
        poll.register(self._signals.fileno(), select.POLLIN)
        for program in (self._master, *self._agents.values()):
            if program.placed is not None:
                poll.register(program.placed.fileno(), select.POLLIN)
        poll.poll(TURN_SECONDS * 1000)

    def _heed_signals(self) -> None:
        names = self._signals.take()
        for name in names:
            if self._stop_reason or len(names) > 1:
                self._killed = True
            if not self._stop_reason:
                self._stop_reason = f"interrupted by {name}"
                self._display.note(f"{name}: flushing and stopping; once more kills at once")

    def _look(self, now: float) -> None:
        self._keep_token()
        first = self._status is None
        status = self._ask()
        if status is None:
            if hung(self._master, now, self._link.answered_at):
                self._display.note("the master does not answer; it is killed and started again")
                self._kill(self._master)
            return
        if first and self._folder.resumed:
            # A drill is of the run, not of each start: what was due before is not done again.
            self._drills = [drill for drill in self._drills if drill.step > step_of(status)]
        self._display.show(status)
        self._teller.tell(status)
        if status.outcome and self._ending_since is None:
            self._ending_since = now
            for agent in self._agents.values():
                agent.keep = False
        if self._ending_since is None:
            self._mind_silent_agents(status, now)
            self._inflict_drills(status)

    def _keep_token(self) -> None:
        """Programs that run keep what they read; those that are started again have to find it."""
        if not self._places.token.exists():
            with contextlib.suppress(OSError):  # a full disk or a folder that is gone has its own words elsewhere
                write_atomically(self._places.token, self._token)
                self._display.note(f"{self._places.token} was gone; it is written again")

    def _ask(self) -> JobStatus | None:
        """The run now, kept as its newest picture; None when the master does not answer."""
        status = self._link.status()
        if status is not None:
            status = self._status = with_known_figures(status, self._status)
            self._rewards.see(status.figures)
            if self._rewards.before is not None and self._folder.info.reward_before is None:
                self._folder.keep_reward_before(self._rewards.before)
        return status

    def _mind_silent_agents(self, status: JobStatus, now: float) -> None:
        """An agent that hangs is killed here: the master may not overtake it, and its members are watched by it alone."""
        for node in status.nodes:
            agent = self._agents.get(node.node)
            if agent is not None and node.seen_at and hung(agent, now, now - max(0.0, status.now - node.seen_at)):
                self._display.note(f"the agent of {node.node} does not answer; it is killed and started again")
                self._kill(agent)

    def _inflict_drills(self, status: JobStatus) -> None:
        for drill in due(self._drills, status):
            self._drills.remove(drill)
            self._link.announce_drill(drill)
            agents = {node: agent.placed.pid for node, agent in self._agents.items() if agent.placed is not None}
            engine = Engine(master=self._master.placed.pid if self._master.placed is not None else None, agents=agents)
            self._display.note(inflict(drill, status, engine, self._places, self._plan.run_id))

    # -- the end --------------------------------------------------------------------------------------------------------

    def _over(self, now: float) -> bool:
        """Whether there is nothing left to wait for. The agents end by the master's order; past the deadline they are told."""
        if self._killed or self._gave_up:
            return True
        if self._stop_accepted and self._ending_since is None:
            self._ending_since = now
        if self._stop_reason and self._ending_since is None and now - self._signals.first_at > STOP_SECONDS:
            return True  # no master has come up to take the wish
        if self._ending_since is None:
            return False
        for agent in self._agents.values():
            agent.keep = False
        if self._status is not None and self._status.state in ENDED:
            return True  # whoever still runs was waited for long enough by the master
        return not any(agent.up for agent in self._agents.values()) or now - self._ending_since > STOP_SECONDS

    def _wind_down(self) -> None:
        """End what still runs: agents, then the master, then whatever they left."""
        if not self._killed:
            self._ask()
        for program in (*self._agents.values(), self._master):
            program.keep = False
        if not self._killed:
            self._terminate(list(self._agents.values()))
            self._ask()
            self._terminate([self._master])
        left = kill_descendants()
        if left and not self._killed:
            self._display.note(f"ended {len(left)} processes that had been left behind")
        if self._follower is not None:
            self._drain(self._follower)
        if self._status is not None:
            self._teller.tell(self._status)
        self._remove_memory()

    def _drain(self, follower: OutputFollower) -> None:
        """Let the reader have the rest of the output, for as long as it takes any; a signal ends that, a killed run waits a moment."""
        began, told = time.monotonic(), False
        while not follower.finish(TURN_SECONDS):
            waited_seconds = time.monotonic() - began
            if self._signals.take() or (self._killed and waited_seconds > KILLED_DRAIN_SECONDS):
                follower.give_up()
            elif waited_seconds > TOLD_DRAIN_SECONDS and not told:
                told = True
                self._display.note("all has ended; the reader of the output is waited for (Ctrl-C: not any more)")
        for left in follower.unshown():
            self._display.note(f"about {left.size_bytes} bytes of output were not shown; all of it is in {left.file}")

    def _terminate(self, programs: Sequence[Supervised]) -> None:
        """SIGTERM, and SIGKILL for what does not heed it; a signal from the user ends the patience."""
        for program in programs:
            if program.placed is not None:
                program.placed.ask_to_end()
        deadline = time.monotonic() + TERMINATE_SECONDS
        while any(program.up for program in programs):
            if time.monotonic() > deadline or self._killed:
                for program in programs:
                    self._kill(program)
            for program in programs:
                program.mind(time.monotonic(), self._display.note)
            reap_orphans(self._pids())
            self._heed_signals()
            self._sleep()

    def _kill(self, program: Supervised) -> None:
        if program.placed is not None:
            program.placed.kill()

    def _remove_memory(self) -> None:
        """What an agent that died near the end did not remove itself, once nothing in it can be needed again.

        A job of ours that failed or was stopped goes on later, from the segments that are left in memory.
        """
        outcome, _ = self._outcome()
        over = outcome == "finished" or (outcome == "failed" and self._plan.kind == "command")
        for node in self._agents:
            memory = node_memory(self._plan.run_id, node)
            if over or not any(segments(memory).glob("*")):
                shutil.rmtree(memory, ignore_errors=True)

    def _outcome(self) -> tuple[Outcome, str]:
        state = self._status.state if self._status is not None else ""
        said = self._status.reason if self._status is not None else ""
        if self._gave_up:
            return "failed", self._gave_up
        if state == "finished" and not self._killed:
            return "finished", said
        if self._killed:
            return "stopped", f"{self._stop_reason}, then killed"
        if self._stop_reason:
            return "stopped", self._stop_reason
        if self._status is not None and self._status.outcome == "stopped":
            return "stopped", said
        return "failed", said or "the master never answered"

    def _pids(self) -> set[int]:
        return {program.placed.pid for program in (self._master, *self._agents.values()) if program.placed is not None}


def with_known_figures(status: JobStatus, before: JobStatus | None) -> JobStatus:
    """A new master has not heard the controller yet: until it has, what the one before knew of the training stands."""
    if before is None or status.controller_url or not before.controller_url:
        return status
    return msgspec.structs.replace(
        status,
        epoch=before.epoch,
        lineage=before.lineage,
        step=before.step,
        steps=before.steps,
        figures=before.figures,
        controller_url=before.controller_url,
    )


def master_program(folder: RunFolder, port: int) -> Program:
    """`-P`: the user's folder may hold modules of any name, and is not searched for ours."""
    run = folder.places.run.resolve()
    argv = (
        sys.executable,
        "-P",
        "-m",
        "aimaster.cli.app",
        "serve",
        "--run-dir",
        str(run),
        "--front-pid",
        str(os.getpid()),
    )
    return Program(name="master", argv=(*argv, "--port", str(port)), log=folder.places.logs / "master.log")


def agent_program(folder: RunFolder, node: NodeId, env: Mapping[str, str] | None = None) -> Program:
    """Its console script, since the module's name is taken by other distributions too."""
    run = folder.places.run.resolve()
    script = Path(sys.executable).with_name("aimaster-agent")
    argv = (str(script),) if script.exists() else (sys.executable, "-P", "-m", "agents.main")
    return Program(
        name=f"agent-{node}",
        argv=(*argv, "--run-dir", str(run), "--node", node, "--front-pid", str(os.getpid())),
        log=folder.places.node(node) / "agent.log",
        node=node,
        env=dict(env or {}),
    )
