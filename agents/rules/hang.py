"""What two looks at a silent member prove. Pure. Silence alone proves nothing: a slow phase is silent too."""

import msgspec

STOPPED = "T"
IDLE_RATIO = 0.01
"""Less than a hundredth of a core is standing still."""


class Frame(msgspec.Struct, frozen=True):
    """One frame of a Python stack, as faulthandler prints it."""

    file: str
    line: int
    function: str


class Look(msgspec.Struct, frozen=True, kw_only=True):
    """What one look at a silent member found."""

    at: float
    """Monotonic seconds."""
    state: str
    """Of /proc/PID/stat."""
    cpu_seconds: float
    stack: tuple[Frame, ...] | None = None
    """Of the thread that beats, innermost first; None where there was no dump."""


def same_place(one: tuple[Frame, ...], other: tuple[Frame, ...]) -> bool:
    """Whether two stacks stand in the same place: all frames alike, where of the innermost only the function counts, since a
    thread that spins moves between the lines of it.
    """
    if not one or len(one) != len(other):
        return False
    return (one[0].file, one[0].function) == (other[0].file, other[0].function) and one[1:] == other[1:]


def evidence(first: Look, second: Look, *, lease_seconds: float | None) -> tuple[str, ...]:
    """The words of wire.HangSuspected that the two looks bear out; `lease_seconds` None while the phase is not learnt."""
    words = []
    if first.state == STOPPED and second.state == STOPPED:
        words.append("state-T-twice")
    apart = second.at - first.at
    if (
        lease_seconds is not None
        and apart >= lease_seconds
        and first.stack is not None
        and second.stack is not None
        and same_place(first.stack, second.stack)
    ):
        words.append("same-frame-twice")
    if apart > 0 and second.cpu_seconds - first.cpu_seconds < IDLE_RATIO * apart:
        words.append("no-cpu")
    return tuple(words)
