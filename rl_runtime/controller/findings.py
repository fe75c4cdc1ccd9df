"""What went wrong in the policy group, for people: the newest few, each once, with the time it was last seen. Pure."""

from collections import deque

import msgspec

MOST = 20


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """Something that went wrong in the group."""

    category: str
    text: str
    at: float


def note(findings: deque[Found], category: str, text: str, now: float) -> None:
    """Put it last; said before, it is moved there."""
    known = [found for found in findings if (found.category, found.text) == (category, text)]
    for found in known:
        findings.remove(found)
    findings.append(Found(category=category, text=text, at=now))
