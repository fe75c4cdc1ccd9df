"""Which phase of keeping a snapshot is going on in which process, told through a mapped file, so that a kill can be aimed at it.

Nothing is replaced: the functions of the product are wrapped by ones that set a byte before and clear it after.
"""

import functools
import mmap
import os
import sys

PHASES = ("save", "seal", "replicate", "flush", "commit", "retention")


class Board:
    """One byte a phase."""

    def __init__(self, path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        self._memory = mmap.mmap(fd, mmap.PAGESIZE)
        os.close(fd)

    def enter(self, phase):
        self._memory[PHASES.index(phase)] = 1

    def leave(self, phase):
        self._memory[PHASES.index(phase)] = 0

    def is_in(self, phase):
        return self._memory[PHASES.index(phase)] == 1

    def now(self):
        return tuple(phase for phase in PHASES if self.is_in(phase))

    def clear(self, phases):
        """A killed process leaves its bytes behind."""
        for phase in phases:
            self.leave(phase)

    def watch(self, owner, name, phase):
        """From now on, calls of `owner.name` show on the board."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def shown(*arguments, **more):
            self.enter(phase)
            try:
                return inner(*arguments, **more)
            finally:
                self.leave(phase)

        setattr(owner, name, shown)


OF_TRAINER, OF_AGENT = ("save", "seal"), ("replicate", "flush", "commit", "retention")


def watch_trainer(board):
    from easyckpt.saver import Saver
    from easyckpt.slot import Slot

    board.watch(Saver, "begin", "save")
    board.watch(Saver, "_finish", "save")
    board.watch(Slot, "claim", "save")
    board.watch(Slot, "seal", "seal")


def watch_agent(board):
    from easyckpt import flush
    from easyckpt.shardserver import Peer
    from easyckpt.storage import FolderStorage

    board.watch(Peer, "push", "replicate")
    board.watch(flush, "flush_segment", "flush")
    board.watch(FolderStorage, "commit", "commit")
    board.watch(FolderStorage, "delete", "retention")


if __name__ == "__main__":
    watch_agent(Board(os.environ["CKPT_BOARD"]))
    from agents.main import main

    main(sys.argv[1:])
