"""A small Slurm cluster on this machine: one controller, two nodes, jobs that end well. Each daemon is a child and ends with the test."""

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from tests.corpus.environment import variables

CONFIGURATION = """ClusterName=corpus
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/d.%n.pid
SlurmctldLogFile={logs}/head/slurmctld.log
SlurmdLogFile={logs}/%n/slurmd.log
SlurmctldDebug=debug3
SlurmdDebug=debug4
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SelectType=select/cons_tres
MpiDefault=none
SlurmctldPort={port}
SlurmdTimeout=30
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 RealMemory=1000
PartitionName=p Nodes=ALL Default=YES State=UP
"""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_jobs(logs: Path, jobs: int) -> None:
    """Start the daemons, run steps and batch jobs, end the daemons."""
    state = Path("/tmp") / f"corpus-slurm-{os.getpid()}"
    for folder in (state / "state", logs / "head", logs / "n1", logs / "n2"):
        folder.mkdir(parents=True)
    state.chmod(0o755)
    first = free_port()
    text = CONFIGURATION.format(
        host=socket.gethostname(), folder=state, logs=logs, port=free_port(), first=first, last=first + 1
    )
    (state / "slurm.conf").write_text(text)
    key = state / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    environ = variables(SLURM_CONF=str(state / "slurm.conf"))
    environ["PATH"] += ":/usr/sbin"
    munge = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={state}/munge.socket", f"--pid-file={state}/munge.pid",
             f"--log-file={logs}/head/munged.log", f"--seed-file={state}/munge.seed"]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        for command, log in ((munge, "head/munged.out"), (["slurmctld", "-D"], "head/slurmctld.out"),
                             (["slurmd", "-D", "-N", "n1"], "n1/slurmd.out"), (["slurmd", "-D", "-N", "n2"], "n2/slurmd.out")):  # fmt: skip
            with (logs / log).open("wb") as out:
                daemons.append(subprocess.Popen(command, env=environ, stdout=out, stderr=subprocess.STDOUT))
            time.sleep(1)  # munge's socket and the controller's port are there before anybody asks for them
        for number in range(jobs):
            verbose = "-vvvv" if number % 3 == 0 else "-v"
            with (logs / f"head/srun-{number}.log").open("wb") as out:
                subprocess.run(
                    ["srun", verbose, "-N", str(1 + number % 2), "-n", str(1 + number % 3), "-l", "--overcommit", "sh", "-c",
                     f"echo step {number}; hostname; env | sort"], env=environ, stdout=out, stderr=subprocess.STDOUT, check=True, timeout=60,
                )  # fmt: skip
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()
        shutil.rmtree(state, ignore_errors=True)
