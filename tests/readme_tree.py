"""Keeps the file tree in README.md true: one line a file, said by the file itself.

python -m tests.readme_tree --write     rewrite the tree from the first sentence of each module's docstring
python -m tests.readme_tree             print it
"""

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOPS = ("aimaster", "agents", "easyckpt", "rl_runtime", "examples", "tests")
BEGIN, END = "<!-- tree: written by python -m tests.readme_tree --write -->\n```\n", "```\n<!-- end of tree -->"
SKIPPED = re.compile(r"__pycache__|\..*|py\.typed|__init__\.py|.*\.pyc|.*\.egg-info")
CLOSED = {"tests/data": "what tests read: samples, logs, keys", "aimaster/master/web": "the status page and its assets"}
"""Folders shown by one line, since their files are data."""
SAID = {
    "aimaster": "control plane: wire records, decisions, master, command line",
    "agents": "the sidecar of each node (a program: nobody imports it)",
    "easyckpt": "checkpoints in memory, on peers and on storage; adopted alone",
    "rl_runtime": "asynchronous GRPO: controller, rollout and policy members",
    "examples": "jobs and loops to start from",
    "tests": "what must hold",
    "tests/unit": "mirrors the packages",
    "tests/flow": "real processes, real kills",
    "tests/bench": "figures: tables for people, last line JSON",
}
ROOT_FILES = {
    ".ci/run": "what CI runs: `make test` from a clean checkout",
    "CHANGELOG.md": "what changed for users",
    "LICENSE": "Apache 2.0",
    "Makefile": "one word for each thing a person or CI does here",
    "README.md": "this page",
    "constraints.txt": "exact versions that were seen working together",
    "pyproject.toml": "packaging, and the rules of tests, style, types and imports, each exception with its reason",
}
WIDTH = 110
SHORT = 40
"""A first sentence shorter than this is only a name; the next one tells."""


def tree(root: Path = ROOT) -> str:
    """The tree as text, top by top."""
    lines = [(name, said) for name, said in ROOT_FILES.items() if (root / name).exists()]
    lines += [line for top in TOPS if (root / top).is_dir() for line in _folder(root, root / top, 0)]
    column = max(len(left) for left, _ in lines) + 2
    return "".join(f"{left:<{column}}{right}".rstrip() + "\n" for left, right in lines)


def _folder(root: Path, folder: Path, depth: int) -> Iterator[tuple[str, str]]:
    name = str(folder.relative_to(root))
    yield f"{'  ' * depth}{folder.name}/", CLOSED.get(name) or SAID.get(name) or _said_by(folder / "__init__.py")
    if name in CLOSED:
        return
    entries = sorted(
        (e for e in os.scandir(folder) if not SKIPPED.fullmatch(e.name)), key=lambda e: (e.is_dir(), e.name)
    )
    for entry in entries:
        path = Path(entry.path)
        if entry.is_dir():
            if any(file.is_file() and not SKIPPED.fullmatch(file.name) for file in path.rglob("*")):
                yield from _folder(root, path, depth + 1)
        else:
            yield f"{'  ' * (depth + 1)}{entry.name}", _said_by(path)


def _said_by(path: Path) -> str:
    """The first sentence of a module's docstring, or of the comment at the head of another text."""
    if not path.is_file() or path.suffix not in {".py", ".toml", ".sh", ".yaml", ".yml", ".c", ".cfg"}:
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
    else:
        head = re.match(r"(?:(?:#|//)[^\n]*\n?)*", text)
        said = re.sub(r"(?m)^(#|//)!?", "", head[0]) if head else ""
    sentences = re.split(r"(?<=[.!?])\s", " ".join(said.strip().split("\n\n")[0].split()))
    line = sentences.pop(0)
    while sentences and len(line) < SHORT:
        line = f"{line} {sentences.pop(0)}"
    line = line.rstrip(".")
    return line if len(line) <= WIDTH else line[: WIDTH - 1].rsplit(" ", 1)[0] + " …"


def readme_with_tree(readme: str, root: Path = ROOT) -> str:
    """The README with the present tree between its marks."""
    before, mark, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        message = f"README.md lacks the marks {BEGIN.splitlines()[0]!r} and {END.splitlines()[1]!r}; put them back"
        raise ValueError(message)
    return before + mark + tree(root) + end + after


def main() -> None:
    """Print the tree, or write it into the README."""
    if sys.argv[1:] == ["--write"]:
        path = ROOT / "README.md"
        path.write_text(readme_with_tree(path.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        sys.stdout.write(tree())


if __name__ == "__main__":
    main()
