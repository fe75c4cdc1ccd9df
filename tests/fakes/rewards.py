"""A reward function as a user writes one."""


def brevity(text: str, answer: str) -> float:
    """Fewer letters earn more: seldom the same for two answers, so that groups have a spread."""
    return 1.0 / (1 + len(text))
