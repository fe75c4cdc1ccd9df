"""Records of the ledger: what the controller never forgets, in the order in which it became true.

    Began -> (EpochOpened | Leased | Admitted | Filtered | Dealt | Committed | Rewound | Flushed)* -> Finished

A sample is known by its key (prompt_id, index): `prompt_id` is a position in the endless order of prompts, `index` counts within
the prompt's group. Only whole groups are dealt, so a deal names prompts. Nothing here does I/O.
"""

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import MemberId
from aimaster.wire.topology import Epoch


class VersionRun(msgspec.Struct, frozen=True, array_like=True):
    """So many tokens in a row, all made by the weights of one version."""

    lineage: int
    step: int
    tokens: int


class Payload(msgspec.Struct, frozen=True, array_like=True):
    """What a completion is made of; kept encoded until it is trained."""

    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[VersionRun, ...]


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """First record: what fixes the order of prompts and the size of a batch for the whole run."""

    rows: int
    """Length of the data set."""
    rows_digest: str
    """Of the first and last rows, so that another data set of the same length is noticed."""
    rules: str
    """How samples become batches, in words."""
    seed: int
    shuffle: bool
    n_generation: int
    batch_samples: int


class EpochOpened(msgspec.Struct, frozen=True, kw_only=True, tag="epoch"):
    """Who is in from now on."""

    epoch: Epoch
    at: float


class Leased(msgspec.Struct, frozen=True, kw_only=True, tag="leased"):
    """The prompts `first` to `last` went out for the first time."""

    first: int
    last: int


class Admitted(msgspec.Struct, frozen=True, kw_only=True, tag="admitted"):
    """A completion is ours: acknowledged after this record is durable, and only the first one of its key."""

    prompt_id: int
    index: int
    reward: float
    rewards: dict[str, float] = {}
    tokens: int
    """Length of the completion."""
    prompt_length: int
    oldest_step: int
    """Step of the oldest weights that made a token of it."""
    member: MemberId
    payload: bytes
    """An encoded Payload; empty where compaction dropped it."""


class Filtered(msgspec.Struct, frozen=True, kw_only=True, tag="filtered"):
    """A whole group without spread: it teaches nothing and is not dealt (DAPO)."""

    prompt_id: int


class Dealt(msgspec.Struct, frozen=True, kw_only=True, tag="dealt"):
    """A batch for `step`. After a rewind the same batch is dealt again on the new lineage."""

    step: int
    lineage: int
    batch_digest: str
    prompts: tuple[int, ...]
    """Groups in order; their samples in order of index are numbered from 0: the positions in `shares`."""
    shares: tuple[tuple[int, ...], ...]
    share_tokens: tuple[int, ...]
    """Prompt and completion tokens of each share, by which work is balanced."""
    at: float


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """All members of the epoch hold the same reduced gradient: the step is done, whoever dies now."""

    lineage: int
    step: int
    epoch: int
    gradient_digest: str
    batch_digest: str
    chain: str
    flusher: MemberId | None
    """The member that writes its snapshot of this step to storage."""
    at: float


class Rewound(msgspec.Struct, frozen=True, kw_only=True, tag="rewound"):
    """From now on `lineage` is live and stands at `step`; later steps of older lineages are void."""

    step: int
    lineage: int
    cause: str
    at: float


class Flushed(msgspec.Struct, frozen=True, kw_only=True, tag="flushed"):
    """A whole snapshot of this version lies on storage."""

    version: Version


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag="finished"):
    """All steps are committed and the last one has a sealed snapshot."""

    step: int
    at: float


Record = Began | EpochOpened | Leased | Admitted | Filtered | Dealt | Committed | Rewound | Flushed | Finished


class PastStep(msgspec.Struct, frozen=True, array_like=True):
    """All that is kept of a step whose batch can no longer be needed."""

    step: int
    lineage: int
    batch_digest: str
    chain: str
    prompts: tuple[int, ...]
