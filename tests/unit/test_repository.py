"""The repository keeps its own rules: arrows between packages, declared dependencies, exact pins, files that fit in a head."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("aimaster", "agents", "easyckpt", "rl_runtime")
# A distribution's import name, where it is another one.
IMPORTED_AS = {"nvidia-ml-py": "pynvml", "prometheus-client": "prometheus_client", "math-verify": "math_verify"}
# Sought at run time and done without where absent; nothing is declared for them on purpose.
OPTIONAL = {"vllm", "ray", "kr8s", "hyperscan"}
EXTRAS = {"torch", "numpy", "vllm", "transformers", "ray", "pyarrow", "safetensors"}
# What makes `aimaster --help` slow, though it belongs to the base.
SLOW = {"aiohttp", "asyncio", "rich", "psutil", "structlog", "prometheus_client"}


@pytest.fixture(scope="session")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))


def modules(root: Path, *packages: str) -> Iterator[Path]:
    for package in packages or PACKAGES:
        yield from sorted((root / package).rglob("*.py"))


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for requirement in requirements}


def run(root: Path, *words: str, timeout_seconds: float = 110) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False, timeout=timeout_seconds)


def test_the_arrows_between_packages(root: Path) -> None:
    """The import contracts of pyproject.toml are kept: who may import whom, what is pure, what holds no torch."""
    done = run(root, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_every_import_is_declared(root: Path, project: dict[str, Any]) -> None:
    """What aimaster and agents import comes with the base install; what easyckpt and rl_runtime import, with [runtime] too."""
    base = names(project["project"]["dependencies"])
    runtime = base | names(project["project"]["optional-dependencies"]["runtime"])
    undeclared = []
    for package in PACKAGES:
        declared = base if package in {"aimaster", "agents"} else runtime
        known = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in declared} | OPTIONAL | set(PACKAGES)
        known |= set(sys.stdlib_module_names)
        for path in modules(root, package):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                found = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                    found = [node.module]
                undeclared += [f"{path.relative_to(root)}: {name}" for name in found if name.split(".")[0] not in known]
    assert undeclared == []


def test_every_dependency_is_pinned_once(root: Path, project: dict[str, Any]) -> None:
    """constraints.txt pins each dependency of the base, [runtime] and [dev] exactly, once, and names no host."""
    text = (root / "constraints.txt").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[^=;\s]+", line) for line in lines)
    pinned = Counter(line.partition("==")[0].lower().replace("_", "-") for line in lines)
    assert [name for name, count in pinned.items() if count > 1] == []
    extras = project["project"]["optional-dependencies"]
    assert names(project["project"]["dependencies"] + extras["runtime"] + extras["dev"]) <= set(pinned)
    assert "torch==2.13.0" in lines
    (transformers,) = [line.partition("==")[2] for line in lines if line.startswith("transformers==")]
    assert (5, 16, 1) <= tuple(map(int, transformers.split("."))) < (5, 20)
    assert "://" not in text


def test_the_base_install_is_light(project: dict[str, Any]) -> None:
    """A sidecar downloads no gigabytes: torch and its like are in extras."""
    base = names(project["project"]["dependencies"])
    assert not base & {"torch", "numpy", "transformers", "vllm", "ray", "pyarrow", "safetensors", "pydantic"}
    assert {"runtime", "vllm", "ray", "k8s", "dev"} <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("script", ["aimaster", "aimaster-agent", "easyckpt"])
def test_console_scripts_exist_and_help_is_light(root: Path, project: dict[str, Any], script: str) -> None:
    """Each console script answers --help with 0, having imported nothing heavy."""
    module, _, function = project["project"]["scripts"][script].partition(":")
    code = f"""
import sys
sys.argv = [{script!r}, "--help"]
import {module} as program
try:
    program.{function}()
except SystemExit as end:
    assert not end.code, end.code
print("\\nloaded:", *sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
    done = run(root, "-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.rpartition("loaded:")[2].split())
    assert not loaded & (EXTRAS | SLOW if script == "aimaster" else EXTRAS)


def test_files_fit_in_a_head(root: Path) -> None:
    """No file is longer than about 400 lines, no function than a screen."""
    long = []
    for path in modules(root):
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        if lines > 420:
            long.append(f"{path.relative_to(root)}: {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                length = node.end_lineno - node.lineno + 1
                if length > 65:
                    long.append(f"{path.relative_to(root)}: {node.name} is {length} lines")
    assert long == []


def test_test_files_have_names_of_their_own(root: Path) -> None:
    """No two test files share a name, so a failure names its file."""
    counts = Counter(path.name for path in (root / "tests").rglob("test_*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_package_is_typed(root: Path) -> None:
    """Users' type checkers read our annotations."""
    assert all((root / package / "py.typed").exists() for package in PACKAGES)


def test_make_targets_exist(root: Path) -> None:
    """The words that README.md and CI use are targets of the Makefile."""
    text = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z-]+):", text))
    assert {"setup", "run", "test", "test-long", "lint", "bench-main", "soak", "model"} <= targets
    readme = (root / "README.md").read_text(encoding="utf-8").partition("<!-- tree")[0]
    assert set(re.findall(r"\bmake ([a-z-]+)", readme)) <= targets


@pytest.mark.parametrize("words", [("check", "."), ("format", "--check", ".")], ids=" ".join)
def test_style(root: Path, words: tuple[str, ...]) -> None:
    """The linter has nothing to say: all its rules are on, each exception in pyproject.toml has its reason."""
    done = run(root, "-m", "ruff", *words)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.timeout(400)
def test_types(root: Path) -> None:
    """The type checker, strict, has nothing to say about the four packages."""
    done = run(root, "-m", "mypy", timeout_seconds=380)
    assert done.returncode == 0, done.stdout[-6000:]
