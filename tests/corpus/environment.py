"""Where the jobs of the healthy corpus run: an environment of their own, and what the system has of MPI and Slurm.

Everything lies under AIMASTER_CORPUS (default ~/.cache/aimaster/corpus): `venv` with requirements.txt, `logs` with one folder per source. About
4 GB and a few minutes the first time. MPI and Slurm come from the system's package manager (Debian: openmpi-bin, slurm-wlm, munge); where they are
not installed their rows say so.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
JOBS = HERE / "jobs"
PROJECT = HERE.parent.parent


def cache_folder() -> Path:
    """The corpus's folder."""
    return Path(os.environ.get("AIMASTER_CORPUS") or Path.home() / ".cache/aimaster/corpus")


def environment() -> Path:
    """The bin folder of the jobs' environment, made when it is not there or its list has changed."""
    folder = cache_folder() / "venv"
    wanted = (HERE / "requirements.txt").read_text()
    stamp = folder / "requirements.txt"
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder / "bin"
    print(f"installing what the jobs need into {folder}: some minutes", file=sys.stderr, flush=True)
    if not (folder / "bin/python").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "-r", str(HERE / "requirements.txt")], check=True)
    stamp.write_text(wanted)
    return folder / "bin"


def variables(**more: str) -> dict[str, str]:
    """The environment of a job: one thread each, nothing fetched, no usage reported."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
    return kept | {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        **more,
    }


def missing(*programs: str) -> str:
    """The programs of these that the system lacks, as a reason; empty when all are there."""
    lacking = [name for name in programs if shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin") is None]
    return f"not installed: {', '.join(lacking)}" if lacking else ""
