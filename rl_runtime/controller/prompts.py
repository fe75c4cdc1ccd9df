"""The endless order of prompts: which row stands at which position. A pure function of position, so a restart repeats it.

Each pass over the data is one permutation of its rows, its own for every pass. The permutation is a Feistel network over the
next power of four, walked until it lands inside: any position is found at once, nothing is stored.
"""

from collections.abc import Mapping, Sequence

import msgspec
import xxhash

ROUNDS = 4


class PromptOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order for one data set and seed."""

    rows: int
    seed: int
    shuffle: bool

    def row(self, prompt_id: int) -> int:
        """Return the row at this position; every row comes once in a pass."""
        turn, place = divmod(prompt_id, self.rows)
        return self._permuted(turn, place) if self.shuffle and self.rows > 1 else place

    def _permuted(self, turn: int, place: int) -> int:
        half = ((self.rows - 1).bit_length() + 1) // 2
        mask = (1 << half) - 1
        while True:
            left, right = place >> half, place & mask
            for number in range(ROUNDS):
                left, right = right, left ^ (_mixed(self.seed, turn, number, right) & mask)
            place = left << half | right
            if place < self.rows:
                return place


def sampling_seed(seed: int, prompt_id: int, index: int) -> int:
    """Return the seed of one completion: the same whoever makes it, and however often."""
    return _mixed(seed, prompt_id, index, 0) >> 1


def rows_digest(rows: Sequence[Mapping[str, str]]) -> str:
    """Hash a few rows of either end: enough to notice another data set."""
    ends = [dict(row) for row in (*rows[:8], *rows[-8:])]
    return xxhash.xxh3_64_hexdigest(msgspec.json.encode(ends))


def _mixed(*numbers: int) -> int:
    return xxhash.xxh3_64_intdigest(",".join(map(str, numbers)).encode())
