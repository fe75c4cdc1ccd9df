"""What can go wrong in the controller.

ControllerError
├── RefusalError              another start would end the same way: the process ends with `REFUSED`
│   ├── ConfigurationError    the job cannot be run as it is configured
│   ├── LedgerMismatchError   the run folder's ledger was begun by another configuration
│   ├── LedgerUnreadableError what the ledger holds cannot be replayed
│   ├── LedgerLostError       there are snapshots of steps of which the ledger knows nothing
│   └── StateLostError        the ledger has gone on from steps of which no snapshot can be read any more
├── LedgerBrokenError     a record contradicts those before it
└── MessageError          a worker sent something impossible; answered by 400
"""


class ControllerError(Exception):
    """Base of all."""


class RefusalError(ControllerError):
    """Will not heal by another start; `category` is one of the taxonomy."""

    category = "app.config"


class ConfigurationError(RefusalError):
    """The job cannot be run as it is configured."""


class LedgerMismatchError(RefusalError):
    """The ledger and the configuration do not belong together."""


class LedgerUnreadableError(RefusalError):
    """The records on disk contradict each other."""

    category = "data.corrupt"


class LedgerLostError(RefusalError):
    """To begin again from zero would silently drop committed steps."""

    category = "data.corrupt"

    def __init__(self, step: int, where: str) -> None:
        super().__init__(
            f"the ledger is empty, but {where} holds a snapshot of step {step} of this run; nothing was changed; bring the ledger folder back, "
            "or begin a new run folder and name that snapshot as train.resume"
        )


class StateLostError(RefusalError):
    """No state can be brought up, and the first steps' batches were let go long ago."""

    category = "data.corrupt"

    def __init__(self, floor: int, head: int) -> None:
        steps = f"of step {floor}" if floor == head else f"between step {floor} and {head}"
        super().__init__(
            f"no snapshot {steps} can be read, in memory, from a peer or on storage, and the batches before step {floor} were "
            "let go; nothing was changed; bring back the storage folder (or a copy of it), or begin a new run"
        )


class LedgerBrokenError(ControllerError):
    """A record that cannot follow those before it: a defect, never repaired in silence."""


class MessageError(ControllerError):
    """A worker's message makes no sense; sending it again will not help."""
