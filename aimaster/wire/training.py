"""Policy member and controller: one idempotent question, `POST /v1/turn`, and its answer.

A member says what it has and what it has done (`Turn`); the controller answers with what to do now (`Word`). A turn may be
resent any number of times, to a restarted controller too: the answer is looked up in the ledger, never counted.

    Fresh -> Begin | Restore | Rehearse -> Rehearsed -> Take -> Taken -> Ready
    Ready -> Compute -> Computed -> (Host -> Hosting) -> Reduce -> Reduced -> Committed -> Ready
                 ^ Aborted, or a new epoch: Compute (the extra shares, possibly none) -> Computed -> Reduce ...
    any   -> Wait (ask again) | Hold -> Held | Leave (drop all, come back Fresh) | Stop
"""

import msgspec

from aimaster.wire.checkpoint import Version
from aimaster.wire.ids import Incarnation, MemberId

# -- what a member says -------------------------------------------------------------------------------------------------


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A whole snapshot that the member could restore from."""

    version: Version
    chain: str
    state_digest: str
    tier: str


class Fresh(msgspec.Struct, frozen=True, kw_only=True, tag="fresh"):
    """No state yet."""

    candidates: tuple[Candidate, ...] = ()


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True, tag="rehearsed"):
    """The joiner is allocated and has copied an older snapshot in `seconds` (0.0 where there was none)."""

    seconds: float


class Taken(msgspec.Struct, frozen=True, kw_only=True, tag="taken"):
    """The joiner holds the state of the hold."""

    version: Version
    state_digest: str


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """State of `Turn.version` in place, nothing else in hand."""


class Computed(msgspec.Struct, frozen=True, kw_only=True, tag="computed"):
    """Local gradients of these shares of `step` are in hand."""

    step: int
    batch_digest: str
    shares: tuple[int, ...]


class Hosting(msgspec.Struct, frozen=True, kw_only=True, tag="hosting"):
    """As `Computed`, and the store of this epoch listens at `address` (host:port)."""

    step: int
    batch_digest: str
    shares: tuple[int, ...]
    epoch: int
    address: str


class Reduced(msgspec.Struct, frozen=True, kw_only=True, tag="reduced"):
    """The vote: the reduced gradient is in hand and not applied."""

    step: int
    epoch: int
    digest: str
    shares: tuple[int, ...]


class Aborted(msgspec.Struct, frozen=True, kw_only=True, tag="aborted"):
    """The reduction failed; local gradients of `shares` are kept."""

    step: int
    epoch: int
    batch_digest: str
    shares: tuple[int, ...]
    reason: str


class Held(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """The forced snapshot of the hold is sealed."""

    version: Version
    state_digest: str


Stage = Fresh | Rehearsed | Taken | Ready | Computed | Hosting | Reduced | Aborted | Held


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """A member's question: this is me and what I have; what now?"""

    member: MemberId
    incarnation: Incarnation
    node: str
    version: Version | None
    """State in place: after this committed step; None when fresh."""
    chain: str = ""
    epoch: int = 0
    """Newest epoch the member knows."""
    sealed: Version | None = None
    """Newest sealed snapshot of its own."""
    sealed_digest: str = ""
    """State digest of that snapshot, so that replicas can be compared at every seal."""
    stage: Stage
    figures: dict[str, float] = {}
    """Loss, gradient norm, seconds in compute and reduce, skipped saves; averaged into the run's figures."""


# -- what the controller answers ----------------------------------------------------------------------------------------


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One completion as trained."""

    prompt_id: int
    index: int
    """Within its group."""
    prompt_tokens: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the engine, at sampling temperature, one per token."""
    versions: tuple[Version, ...]
    """Of the weights that made each token, run-length free; one per token."""
    reward: float
    advantage: float
    untrained: int = 0
    """So many of its first tokens are not trained."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A numbered part of a dealt batch."""

    number: int
    samples: tuple[Sample, ...]


class Wait(msgspec.Struct, frozen=True, kw_only=True, tag="wait"):
    """Nothing yet; the member beats and asks again at once (the controller holds each question up to a second)."""

    reason: str


class Begin(msgspec.Struct, frozen=True, kw_only=True, tag="begin"):
    """Initialise the model from the configuration, warm start included, as version `(lineage, 0)`; come back Ready."""

    lineage: int


class Restore(msgspec.Struct, frozen=True, kw_only=True, tag="restore"):
    """Restore `version` from the nearest good tier and go on as `(lineage, version.step)`; come back Ready, or Fresh with fewer candidates."""

    version: Version
    lineage: int


class Rehearse(msgspec.Struct, frozen=True, kw_only=True, tag="rehearse"):
    """Allocate, copy any older snapshot (`version`, None where there is none), come back Rehearsed."""

    version: Version | None


class Take(msgspec.Struct, frozen=True, kw_only=True, tag="take"):
    """The others hold at `version`: copy it now, within `deadline_seconds`, verify `state_digest`, come back Taken."""

    version: Version
    lineage: int
    state_digest: str
    deadline_seconds: float


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag="hold"):
    """Seal a snapshot of your version (forced), come back Held and ask again until something else is answered."""

    version: Version


class Compute(msgspec.Struct, frozen=True, kw_only=True, tag="compute"):
    """Add the gradients of these shares to those in hand (of the same step and batch digest; others are dropped first)."""

    step: int
    lineage: int
    epoch: int
    batch_digest: str
    shares: tuple[Share, ...]
    loss_tokens: int
    """The loss normaliser: trained completion tokens of the whole dealt batch."""
    sequences: int
    """Sequences of the whole dealt batch."""
    learning_rate: float
    """For this step; a function of the step alone."""


class Host(msgspec.Struct, frozen=True, kw_only=True, tag="host"):
    """You are first in this epoch: open its store and come back Hosting."""

    epoch: int


class Reduce(msgspec.Struct, frozen=True, kw_only=True, tag="reduce"):
    """Every share is computed: reduce now. With a world of one there is no store and no group."""

    step: int
    epoch: int
    rank: int
    world: int
    address: str
    timeout_seconds: float


class Committed(msgspec.Struct, frozen=True, kw_only=True, tag="committed"):
    """Durably committed: clip, step the optimizer, snapshot; come back Ready at `version`."""

    version: Version
    epoch: int
    chain: str
    flush: bool
    """True: this member's snapshot of this step is to go to storage."""


class Leave(msgspec.Struct, frozen=True, kw_only=True, tag="leave"):
    """Fenced: you are no longer in. Drop what you have and come back Fresh."""

    reason: str


class Stop(msgspec.Struct, frozen=True, kw_only=True, tag="stop"):
    """The job is finished: wait for the last snapshot to be sealed and exit 0."""

    reason: str


Word = Wait | Begin | Restore | Rehearse | Take | Hold | Compute | Host | Reduce | Committed | Leave | Stop
