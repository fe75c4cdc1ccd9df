"""What every table of the configuration is: a frozen record of typed keys, each with a default. Unknown keys are refused.

The types say which numbers have a meaning, so that the check finds all others; that no number is NaN or infinite it sees to by itself.
"""

from typing import Annotated, Literal

import msgspec

Dtype = Literal["bfloat16", "float16", "float32"]

LARGEST = 2**31 - 1
"""Of any number of things."""

Positive = Annotated[int, msgspec.Meta(ge=1, le=LARGEST)]
NonNegative = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
LimitOrAll = Annotated[int, msgspec.Meta(ge=-1, le=LARGEST)]
"""-1 is no limit."""
Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
"""Of nodes, members, ranks, processes, layers."""
Seed = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
"""What every generator of random numbers takes."""

PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
"""Clocks and timers take no more."""
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]
"""A share that is not nothing."""
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
"""From nothing to all."""
OpenShare = Annotated[float, msgspec.Meta(gt=0, lt=1)]
"""Neither nothing nor all."""
Below1 = Annotated[float, msgspec.Meta(ge=0, lt=1)]
"""A share that is not all: what is averaged, dropped or held out."""


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the TOML file."""
