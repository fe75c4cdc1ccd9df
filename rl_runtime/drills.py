"""Hangs that a member inflicts on itself, to show that they are found: only in its first incarnation, only where a drill says so."""

import ctypes
import os

import structlog

from rl_runtime.config import HangDrill

FOREVER_SECONDS = 1_000_000

log = structlog.get_logger("drill")


class Drills:
    """The drills of one member."""

    def __init__(self, drills: tuple[HangDrill, ...], *, member: str, incarnation: int) -> None:
        self._mine = [drill for drill in drills if drill.member == member] if incarnation == 0 else []

    def at(self, step: int) -> None:
        """Hang if a drill for this step, or one before it, is due."""
        for drill in self._mine:
            if step >= drill.step:
                log.warning("hanging, as a drill asked", how=drill.how, step=step)
                hang(drill.how)


def hang(how: str) -> None:
    """Never return: asleep in C with the interpreter's lock held, blocked on a pipe, or spinning."""
    if how == "gil":
        sleep = ctypes.PyDLL(None).sleep  # PyDLL keeps the lock: no other thread runs either
        while True:  # the signal that asks for a stack dump ends a sleep
            sleep(FOREVER_SECONDS)
    elif how == "pipe":
        reading, _writing = os.pipe()
        os.read(reading, 1)
    else:
        while True:
            pass
