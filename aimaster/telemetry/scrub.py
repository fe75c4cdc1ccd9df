"""Keeps secrets out of what leaves the node: log excerpts, findings, our own log lines. Pure.

Bounded on purpose: a pattern that is not here is not found, so excerpts stay short as well.
"""

import re
from collections.abc import Iterable
from typing import Final

HIDDEN: Final = "[hidden]"
MAX_LINE_CHARACTERS: Final = 2000

_NAME: Final = (
    r"[\w.-]*(?:pass(?:word|wd|phrase)?|secret|token|api[_-]?key|access[_-]?key|private[_-]?key|credentials?|auth)"
)
_PATTERNS: Final = (
    # key = value, "key": "value", --key value; the name stays
    re.compile(rf"""(?ix) (\b{_NAME}["']?\s*[=:]\s*["']?) (?!//|\d{{1,4}}\b|true|false|none|null) [^\s"',;&]{{4,}}"""),
    re.compile(rf"(?i)(--{_NAME}\s+)(?!-)\S{{4,}}"),
    re.compile(r"(?i)(\bauthorization\s*[:=]\s*(?:bearer|basic)\s+)\S+"),
    re.compile(r"(?i)(\bbearer\s+)[\w.~+/-]{8,}=*"),
    # user:password@host
    re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s/:@]+:)[^\s/@]+(?=@)"),
    # tokens that are known by their beginning
    re.compile(r"()\b(?:hf_|sk-|ghp_|gho_|github_pat_|xox[abp]-|AKIA|LTAI)[\w-]{12,}"),
    re.compile(r"()\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]*"),
    re.compile(r"()-----BEGIN [A-Z ]*PRIVATE KEY-----.*"),
)


def scrub(text: str) -> str:
    """Return the text with every known kind of secret hidden."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def excerpt(lines: Iterable[str], *, max_lines: int = 50, max_characters: int = 16_384) -> tuple[str, ...]:
    """Return the last lines, scrubbed, each and all of them bounded; newest are kept first."""
    kept: list[str] = []
    room = max_characters
    for line in reversed(list(lines)[-max_lines:]):
        short = scrub(line.rstrip("\r\n")[:MAX_LINE_CHARACTERS])
        room -= len(short)
        if room < 0:
            break
        kept.append(short)
    return tuple(reversed(kept))
