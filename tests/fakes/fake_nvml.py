"""Builds the fake libnvidia-ml.so.1 with gcc, once a session, and drives it through its control file."""

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).parent / "nvml" / "nvml.c"


def build(folder: Path) -> Path:
    """The folder that holds the library, for LD_LIBRARY_PATH; None where there is no compiler."""
    library = folder / "libnvidia-ml.so.1"
    if not library.exists():
        command = ["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(SOURCE), f"-Wl,-soname,{library.name}"]
        subprocess.run(command, check=True, capture_output=True)
    return folder


def has_compiler() -> bool:
    return shutil.which("gcc") is not None


class FakeNvml:
    """The control file of one fake driver."""

    def __init__(self, library: Path, state: Path) -> None:
        self.state = state
        self.values: dict[str, int] = {}
        self.environment = {"LD_LIBRARY_PATH": str(library), "FAKE_NVML_STATE": str(state)}
        self.set()

    def set(self, **values: int) -> None:
        """Change values; `gpu3__temp=91` is the temperature of GPU 3."""
        self.values |= {name.replace("__", "."): value for name, value in values.items()}
        fresh = self.state.with_suffix(".new")
        fresh.write_text("".join(f"{name} {value}\n" for name, value in self.values.items()))
        fresh.replace(self.state)

    def xid(self, code: int, gpu: int = 0) -> None:
        """The driver reports an Xid."""
        self.set(xid=code, xid_gpu=gpu, xid_seq=self.values.get("xid_seq", 0) + 1)
