"""What every table of the configuration is: a frozen record of typed keys, each with a default. Unknown keys are refused."""

from typing import Annotated, Literal

import msgspec

Dtype = Literal["bfloat16", "float16", "float32"]
Positive = Annotated[int, msgspec.Meta(ge=1)]
NonNegative = Annotated[int, msgspec.Meta(ge=0)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
Ratio = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One table of the TOML file."""
