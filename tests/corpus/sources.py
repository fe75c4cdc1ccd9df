"""The sources of the healthy corpus: each runs real jobs that end well and leaves their logs in a folder.

A source raises `NotHere` with the reason when its program is not installed; any other failure of a job is told in its row and fails the whole.
"""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tests.corpus import slurm
from tests.corpus.environment import JOBS, PROJECT, environment, missing, variables

UPTIME = re.compile(rb"\[ *(\d+\.\d+)\]")
BOOT_SECONDS = 120.0
TALKATIVE = (
    "+dynamo,+aot,+inductor,output_code,graph,graph_code,guards,schedule,fusion,recompiles,aot_graphs,post_grad_graphs"
)


class NotHere(Exception):  # noqa: N818 - a reason, not an error
    """The program is not installed on this machine."""


def launch(command: list[object], log: Path, *, seconds: float = 1500, **environ: str) -> None:
    """Run one job to its good end, its output in a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as out:
        done = subprocess.run(
            [str(word) for word in command], stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, timeout=seconds,
            env=variables(**environ), cwd=log.parent, check=False,
        )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}; see {log}")


def torchrun(ranks: int, folder: Path, job: str, *arguments: object) -> list[object]:
    start = [
        environment() / "python",
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        ranks,
        "--rdzv-backend",
        "c10d",
    ]
    return [
        *start,
        "--rdzv-endpoint",
        "127.0.0.1:0",
        "--log-dir",
        folder / "ranks",
        "--redirects",
        "3",
        JOBS / job,
        *arguments,
    ]


def torch_ddp(folder: Path, scale: int) -> None:
    """torchrun, DDP, everything PyTorch can say of its distributed side."""
    talk = {"TORCH_CPP_LOG_LEVEL": "INFO", "TORCH_DISTRIBUTED_DEBUG": "INFO"}  # DETAIL: this torch crashes in it
    for seed in range(2):
        launch(torchrun(2 + seed, folder / f"n{seed}", "torch_ddp.py", 1500 * scale, seed), folder / f"n{seed}/launch.log", **talk,
               TORCH_LOGS="+distributed,+c10d,+ddp_graphs,+torch.distributed.elastic")  # fmt: skip


def torch_fsdp(folder: Path, scale: int) -> None:
    """torchrun, FSDP2, distributed checkpoints."""
    launch(torchrun(2, folder, "torch_fsdp.py", 600 * scale, folder / "ckpt"), folder / "launch.log", TORCH_CPP_LOG_LEVEL="INFO",
           TORCH_DISTRIBUTED_DEBUG="INFO", TORCH_LOGS="+fsdp,+distributed,+dtensor")  # fmt: skip
    shutil.rmtree(folder / "ckpt")


def torch_compile(folder: Path, scale: int) -> None:
    """torch.compile with all its artifacts printed."""
    for number, (backend, models) in enumerate((("inductor", 2), ("aot_eager", 200))):
        launch([environment() / "python", JOBS / "torch_compile.py", models * scale, backend, number], folder / f"{number}-{backend}.log",
               TORCH_LOGS=TALKATIVE, TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"), TORCHINDUCTOR_COMPILE_THREADS="1")  # fmt: skip
    shutil.rmtree(folder / "cache", ignore_errors=True)


def hf_trainer(folder: Path, scale: int) -> None:
    """transformers Trainer, resumed once."""
    launch([environment() / "python", JOBS / "hf_trainer.py", 600 * scale, folder / "out"], folder / "train.log")
    shutil.rmtree(folder / "out")


def accelerate(folder: Path, scale: int) -> None:
    """Accelerate under torchrun."""
    launch(
        torchrun(2, folder, "accelerate_loop.py", 1200 * scale, folder / "state"),
        folder / "launch.log",
        ACCELERATE_LOG_LEVEL="DEBUG",
    )
    shutil.rmtree(folder / "state", ignore_errors=True)


def lightning(folder: Path, scale: int) -> None:
    """Lightning, DDP with its own launcher."""
    launch(
        [environment() / "python", JOBS / "lightning_fit.py", 3 * scale, folder / "out"],
        folder / "fit.log",
        NCCL_DEBUG="INFO",
    )
    shutil.rmtree(folder / "out", ignore_errors=True)


def deepspeed(folder: Path, scale: int) -> None:
    """DeepSpeed, ZeRO 1 and 3."""
    for stage in (1, 3):
        launch(torchrun(2, folder / f"zero{stage}", "deepspeed_zero.py", 200 * scale, folder / "ckpt", stage), folder / f"zero{stage}/launch.log",
               DS_ACCELERATOR="cpu", DS_LOG_LEVEL="debug")  # fmt: skip
        shutil.rmtree(folder / "ckpt", ignore_errors=True)


def ray(folder: Path, scale: int) -> None:
    """Ray: driver, raylet, gcs_server, workers, the dashboard and its agent, at the debug level."""
    session = Path("/tmp") / f"corpus-ray-{os.getpid()}"  # the sockets' path may not be long
    try:
        launch([environment() / "python", JOBS / "ray_tasks.py", 16 * scale, session], folder / "head/driver.log",
               RAY_BACKEND_LOG_LEVEL="debug", RAY_LOG_TO_STDERR="0", RAY_verbose_spill_logs="1")  # fmt: skip
        logs = max(session.glob("session_2*/logs"))
        shutil.copytree(logs, folder / "head/session", dirs_exist_ok=True, symlinks=False)
    finally:
        shutil.rmtree(session, ignore_errors=True)


def vllm(folder: Path, scale: int) -> None:
    """vLLM's engine, worker and API processes at the debug level, with a trace of functions."""
    model = next(iter(sorted((PROJECT / "models").glob("*/config.json"))), None)
    if model is None:
        raise NotHere("no model: make model")
    launch([environment() / "python", JOBS / "vllm_generate.py", 12 * scale, model.parent], folder / "engine.log", VLLM_LOGGING_LEVEL="DEBUG",
           VLLM_CPU_KVCACHE_SPACE="1", TORCH_CPP_LOG_LEVEL="INFO")  # fmt: skip


def mpi(folder: Path, scale: int) -> None:
    """Open MPI, everything its frameworks can say."""
    if reason := missing("mpirun"):
        raise NotHere(reason)
    verbose = [word for name in ("plm", "oob", "rml", "routed", "grpcomm", "state", "errmgr", "ess", "iof", "odls", "ras", "rmaps", "btl",
               "pml", "coll", "bml", "mtl", "pmix", "hwloc", "schizo", "filem") for word in ("--mca", f"{name}_base_verbose", "100")]  # fmt: skip
    for ranks in (2, 4):
        launch(["mpirun", "--allow-run-as-root", "--oversubscribe", "-np", ranks, "--timestamp-output", "--tag-output", *verbose,
                environment() / "python", JOBS / "mpi_ring.py", 400 * scale], folder / f"mpirun-{ranks}.log")  # fmt: skip


def slurm_jobs(folder: Path, scale: int) -> None:
    """Slurm: controller, two node daemons, jobs and steps, at the deepest debug level."""
    if reason := missing("slurmctld", "slurmd", "srun", "munged"):
        raise NotHere(reason)
    slurm.run_jobs(folder, 60 * scale)


def kernel(folder: Path, scale: int) -> None:
    """How this machine's kernel came up. What processes suffered later may be no good health, and is left out."""
    done = subprocess.run(["dmesg"], capture_output=True, check=False)
    if done.returncode != 0 or not done.stdout:
        raise NotHere("dmesg may not be read here")
    folder.mkdir(parents=True, exist_ok=True)
    boot = [
        line
        for line in done.stdout.splitlines(keepends=True)
        if (at := UPTIME.match(line)) and float(at[1]) < BOOT_SECONDS
    ]
    if not boot:
        raise NotHere("the kernel's buffer no longer holds the boot")
    (folder / "dmesg.log").write_bytes(b"".join(boot))


def ourselves(folder: Path, scale: int) -> None:
    """This project's own programs: a run of examples/tiny.toml."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    launch([PROJECT / ".venv/bin/aimaster", "run", PROJECT / "examples/tiny.toml", "--run-dir", run, "--train.max_num_steps", 120 * scale],
           folder / "front.log")  # fmt: skip
    for path in sorted(run.rglob("*")):
        if path.is_file() and path.suffix not in (".log", ".out", ".err"):
            path.unlink()


SOURCES: dict[str, Callable[[Path, int], None]] = {
    "torchrun-ddp": torch_ddp,
    "torchrun-fsdp": torch_fsdp,
    "torch-compile": torch_compile,
    "hf-trainer": hf_trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "deepspeed": deepspeed,
    "ray": ray,
    "vllm": vllm,
    "open-mpi": mpi,
    "slurm": slurm_jobs,
    "kernel": kernel,
    "aimaster": ourselves,
}


def make(name: str, folder: Path, *, scale: int, fresh: bool) -> str:
    """Run a source unless its logs are there already; the reason why there are none, or nothing."""
    done = folder / ".done"
    if done.is_file() and not fresh:
        return done.read_text()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began, reason = time.monotonic(), ""
    try:
        SOURCES[name](folder, scale)
    except NotHere as absent:
        reason = str(absent)
    except (RuntimeError, subprocess.SubprocessError) as error:
        return f"FAILED: {error}"
    print(f"{name}: {reason or f'{time.monotonic() - began:.0f} s'}", flush=True)
    done.write_text(reason)
    return reason
