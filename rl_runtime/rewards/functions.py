"""The built-in reward functions that are quick and cannot hang: `function(text, answer) -> 0.0 or 1.0`. Pure."""

import re

_AFTER_HASHES = re.compile(r"####\s*\$?(-?[0-9][0-9.,]*)")
_NUMBER = re.compile(r"-?\$?[0-9][0-9.,]*")
_CHOICE = re.compile(r"<answer>\s*\(?([A-Za-z])\)?[.)]?\s*</answer>|\\boxed\{\s*\(?([A-Za-z])\)?\s*\}")


def exact(text: str, answer: str) -> float:
    """The text is the answer, and nothing else."""
    return float(text == answer)


def gsm8k(text: str, answer: str) -> float:
    """The first `#### N` of the text names the number of the answer: GSM8K's strict match."""
    given, wanted = number_after_hashes(text), reference_number(answer)
    return float(given is not None and given == wanted)


def gsm8k_lenient(text: str, answer: str) -> float:
    """As `gsm8k`; a text without `####` is judged by its last number."""
    given = number_after_hashes(text) or _last_number(text)
    return float(given is not None and given == reference_number(answer))


def format_hashes(text: str, answer: str) -> float:  # noqa: ARG001 - every reward function is called alike
    """The text states a result as `#### N`, right or wrong."""
    return float(number_after_hashes(text) is not None)


def single_choice(text: str, answer: str) -> float:
    """The last letter in `<answer>` tags or in `boxed` braces is the answer's."""
    given = [first or second for first, second in _CHOICE.findall(text)]
    found = _CHOICE.search(answer)
    wanted = (found[1] or found[2]) if found else answer.strip()
    return float(bool(given) and given[-1].upper() == wanted.upper())


def number_after_hashes(text: str) -> str | None:
    """Return the number after the first `####`, without thousands separators."""
    found = _AFTER_HASHES.search(text)
    return _plain(found[1]) if found else None


def reference_number(answer: str) -> str:
    """Return the number a reference answer stands for: after `####` where it has that, else all of it."""
    return number_after_hashes(answer) or _plain(answer.strip())


def _last_number(text: str) -> str | None:
    numbers = _NUMBER.findall(text)
    return _plain(numbers[-1]) if numbers else None


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")
