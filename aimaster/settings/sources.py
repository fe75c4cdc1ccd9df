"""Where values come from: a TOML file, then the environment, then flags; a later source wins key by key.

The result is one tree of tables whose leaves are `Given`: the value, who gave it, and whether it is still text.

    AIMASTER_TRAIN__OPTM_LR=1e-5            environment; `_FILE` behind the name reads the value from that file
    --train.optm_lr 1e-5, --train.optm_lr=1e-5, --train.compile     flags
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from aimaster.settings.errors import Problem

VARIABLE = re.compile(r"AIMASTER_(\w+?__\w+)")
SECRET = re.compile(r"(?i)(token|secret|passw|api_?key|credential|access_?key)")
NUMBER = re.compile(r"-[\d.]")
SURROGATE = re.compile("[\ud800-\udfff]")
"""How Python holds bytes of the command line and the environment that are not UTF-8."""
OTHERS = ("agent",)
"""First parts of variables that set other programs (`AIMASTER_AGENT__…` is the agent's own)."""


class Given(msgspec.Struct, frozen=True):
    """A value and who gave it."""

    value: Any
    """As read."""
    origin: str
    """The file's name, `environment NAME` or `flag --name`."""
    is_text: bool = False
    """Whether the type of the key decides how the text is read."""


Tree = dict[str, Any]
"""Tables by name; a leaf is a Given."""


def read_file(path: Path, problems: list[Problem]) -> Tree:
    """The file's tables; a file that cannot be read or parsed is a problem."""
    try:
        document = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        problems.append(Problem(key="", where=str(path), text="no such file"))
    except OSError as error:
        problems.append(Problem(key="", where=str(path), text=f"cannot be read: {error.strerror}"))
    except UnicodeDecodeError as error:
        text = f"is no text (byte {error.start} is not UTF-8); name a TOML file, saved as UTF-8"
        problems.append(Problem(key="", where=str(path), text=text))
    except tomllib.TOMLDecodeError as error:
        problems.append(Problem(key="", where=str(path), text=f"is not valid TOML: {error}"))
    except ValueError:  # a number of thousands of digits
        problems.append(Problem(key="", where=str(path), text="holds a number of too many digits"))
    except RecursionError:
        problems.append(Problem(key="", where=str(path), text="nests lists or tables too deep to be read"))
    else:
        return {key: _mark(value, str(path)) for key, value in document.items()}
    return {}


def _mark(value: Any, origin: str) -> Any:
    if isinstance(value, dict):
        return {key: _mark(item, origin) for key, item in value.items()}
    return Given(value, origin)


def read_environment(tree: Tree, environ: Mapping[str, str], known: Mapping[str, str], problems: list[Problem]) -> None:
    """Place AIMASTER_SECTION__KEY variables. `known` maps lower-case dotted paths to the spelling of the file."""
    for name in sorted(environ):
        match = VARIABLE.fullmatch(name)
        if match is None:
            continue
        text, dotted = environ[name], match[1].lower().replace("__", ".")
        if dotted.split(".")[0] in OTHERS:
            continue
        if dotted not in known and dotted.endswith("_file"):
            dotted = dotted.removesuffix("_file")
            try:
                text = Path(text).read_text(encoding="utf-8").rstrip("\n")
            except (OSError, UnicodeDecodeError) as error:
                problems.append(Problem(key=dotted, where=f"environment {name}", text=f"cannot be read: {error}"))
                continue
        given = Given(text, f"environment {name}", is_text=True)
        _place(tree, known.get(dotted, dotted).split("."), given, problems)


def read_flags(tree: Tree, flags: Sequence[str], problems: list[Problem]) -> None:
    """Place `--section.key value`, `--section.key=value` and the bare `--section.key`, which means true."""
    position = 0
    while position < len(flags):
        word = flags[position]
        position += 1
        if not word.startswith("--") or len(word) == len("--"):
            problems.append(
                Problem(key="", where="flags", text=f"{word!r} is neither a flag (--section.key) nor a value")
            )
            continue
        name, equals, text = word[2:].partition("=")
        if not equals:
            following = flags[position] if position < len(flags) else "--"
            if following.startswith("-") and not NUMBER.match(following):
                text = "true"
            else:
                text = following
                position += 1
        if SECRET.search(name) and name.split(".")[0] == "custom":
            remedy = f"a secret is not taken as a flag, where every process sees it; use AIMASTER_{name.upper().replace('.', '__')}_FILE"
            problems.append(Problem(key=name, where=f"flag --{name}", text=remedy))
            continue
        _place(tree, name.split("."), Given(text, f"flag --{name}", is_text=True), problems)


def _place(tree: Tree, path: Sequence[str], given: Given, problems: list[Problem]) -> None:
    if any(SURROGATE.search(text) for text in (given.value, *path)):
        text = "is no text: it holds bytes that are not UTF-8"
        problems.append(
            Problem(key=SURROGATE.sub("\N{REPLACEMENT CHARACTER}", ".".join(path)), where=given.origin, text=text)
        )
        return
    node = tree
    for step in path[:-1]:
        below = node.setdefault(step, {})
        if isinstance(below, Given):  # a plain value becomes a table of its own: the later source wins
            below = node[step] = {}
        node = below
    if isinstance(node.get(path[-1]), dict) and not given.value.lstrip().startswith("{"):
        key = ".".join(path)
        problems.append(Problem(key=key, where=given.origin, text=f"is a table; name one of its keys ({key}.…)"))
        return
    node[path[-1]] = given
