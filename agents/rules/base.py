"""How a rule words what it concludes from a reading. Pure.

A *condition* lasts: its finding keeps its id as long as it does. An *event* happened once, at the reading's time, which is in its id.
"""

from aimaster.wire.health import Action, Evidence, FaultOf, Finding, Reading, Severity, Subject

NEAR_RATIO = 0.95
WARNS = 45
"""Weight of what supports a failure and raises none."""


def conclude(
    reading: Reading,
    sign: str,
    category: str,
    text: str,
    *,
    about: str = "",
    weight: int,
    severity: Severity = "error",
    gpu: str | None = None,
    pid: int | None = None,
    fault_of: FaultOf | None = None,
    action: Action | None = None,
    event: bool = False,
    **details: object,
) -> Finding:
    """A statement of this node about itself, resting on one reading. `about` tells findings of one sign apart."""
    words = [reading.node, sign, about] + ([f"{reading.time_seconds:.3f}"] if event else [])
    proof = Evidence(
        node=reading.node, file=f"sensor:{reading.sensor}", time_seconds=reading.time_seconds, text=text, sign=sign
    )
    return Finding(
        id=":".join(word for word in words if word),
        sign=sign,
        category=category,
        role="self",
        severity=severity,
        subject=Subject(node=reading.node, gpu=gpu, pid=pid),
        node=reading.node,
        time_seconds=reading.time_seconds,
        fault_of=fault_of,
        action=action,
        weight=weight,
        details={name: str(value) for name, value in details.items()},
        evidence=(proof,),
    )


def number(reading: Reading, name: str, otherwise: float = 0.0) -> float:
    """A value as a number; `otherwise` where it was not read."""
    value = reading.values.get(name)
    return float(value) if isinstance(value, int | float) else otherwise


def near(reading: Reading, name: str, limit_name: str, about: str, what: str) -> list[Finding]:
    """A warning where something comes near its limit."""
    have, limit = number(reading, name), number(reading, limit_name)
    if limit <= 0 or have < NEAR_RATIO * limit:
        return []
    text = f"{about} has {have:.0f} of {limit:.0f} {what}"
    weight = 60 if have >= limit else WARNS
    return [
        conclude(
            reading,
            f"limit.{name}",
            "node.limits",
            text,
            about=about,
            weight=weight,
            severity="warning",
            have=int(have),
            limit=int(limit),
        )
    ]
