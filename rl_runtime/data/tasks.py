"""Built-in tasks: rows made on the spot, a function of the task's name and the position alone.

One prompt in ten, chosen by a hash of its text, is held out: it is never trained on, in any run.
"""

import random
import re
import zlib
from collections.abc import Callable, Mapping
from typing import Final

Maker = Callable[[random.Random], tuple[str, str]]

TASK_ROWS: Final = 100_000
"""Length of a built-in data set; one pass is longer than any small run."""

NAMES: Final = ("Tom", "Anna", "Ben", "Mia", "Sam", "Lily", "Max", "Emma", "Leo", "Nora")
THINGS: Final = ("apples", "books", "pens", "stamps", "coins", "cards", "shells", "stickers", "marbles", "eggs")
STORIES: Final = (
    ("{name} has {a} {things}. {name} gets {b} more. How many {things} does {name} have now?", 1),
    ("{name} has {a} {things}. {name} gives away {b} of them. How many {things} are left?", -1),
    ("There are {a} {things} in one box and {b} in another. How many {things} are there in all?", 1),
    ("{name} had {a} {things} and lost {b} of them. How many {things} does {name} have now?", -1),
)
SHOTS: Final = (
    ("Kim has 5 balls. Kim gets 4 more. How many balls does Kim have now?", "5 + 4 = 9", 9),
    ("Jack has 12 cookies. Jack gives away 7 of them. How many cookies are left?", "12 - 7 = 5", 5),
    ("There are 8 chairs in one room and 6 in another. How many chairs are there in all?", "8 + 6 = 14", 14),
)


def is_held_out(prompt: str) -> bool:
    """Tell whether a prompt is never trained on."""
    return zlib.crc32(prompt.encode()) % 10 == 0


def task_maker(name: str) -> Maker | None:
    """Return the maker of a task's rows: sort6 (any number of digits), add2, copy6, one_step; None for another name."""
    if name in ("one_step", "onestep"):
        return _one_step
    found = re.fullmatch(r"(sort|add|copy)([1-9][0-9]?)", name)
    if found is None:
        return None
    size = int(found[2])
    makers: Mapping[str, Callable[[random.Random, int], tuple[str, str]]] = {"sort": _sort, "add": _add, "copy": _copy}
    make = makers[found[1]]
    return lambda dice: make(dice, size)


def task_row(name: str, position: int, *, held_out: bool) -> dict[str, str]:
    """Return the row at a position: the first prompt of its own sequence that is on the right side of the split."""
    make = task_maker(name)
    if make is None:
        raise KeyError(name)
    # Repeatable, not secret.
    dice = random.Random(f"{name} {'held out' if held_out else 'trained'} {position}")  # noqa: S311
    while True:
        prompt, answer = make(dice)
        if is_held_out(prompt) == held_out:
            return {"prompt": prompt, "answer": answer}


def _digits(dice: random.Random, count: int) -> str:
    return "".join(dice.choice("0123456789") for _ in range(count))


def _sort(dice: random.Random, size: int) -> tuple[str, str]:
    digits = _digits(dice, size)
    return f"{digits}=", "".join(sorted(digits))


def _copy(dice: random.Random, size: int) -> tuple[str, str]:
    digits = _digits(dice, size)
    return f"{digits}=", digits


def _add(dice: random.Random, size: int) -> tuple[str, str]:
    first, second = (dice.randrange(10**size) for _ in range(2))
    return f"{first:0{size}d}+{second:0{size}d}=", str(first + second)


def _one_step(dice: random.Random) -> tuple[str, str]:
    story, sign = dice.choice(STORIES)
    first, second = dice.randint(2, 20), dice.randint(2, 20)
    if sign < 0 and second > first:
        first, second = second, first
    question = story.format(name=dice.choice(NAMES), things=dice.choice(THINGS), a=first, b=second)
    shots = "".join(f"Question: {text}\nAnswer: {steps}\n#### {result}\n\n" for text, steps, result in SHOTS)
    sum_text = f"{first} {'+' if sign > 0 else '-'} {second} = {first + sign * second}"
    return f"{shots}Question: {question}\nAnswer:", f"{sum_text}\n#### {first + sign * second}"
