"""What can go wrong in the controller.

ControllerError
├── ConfigurationError    the job cannot be run as it is configured
├── LedgerMismatchError   the run folder's ledger was begun by another configuration
├── LedgerBrokenError     a record contradicts those before it
└── MessageError          a worker sent something impossible; answered by 400
"""


class ControllerError(Exception):
    """Base of all."""


class ConfigurationError(ControllerError):
    """The job cannot be run as it is configured."""


class LedgerMismatchError(ControllerError):
    """The ledger and the configuration do not belong together."""


class LedgerBrokenError(ControllerError):
    """A record that cannot follow those before it: a defect, never repaired in silence."""


class MessageError(ControllerError):
    """A worker's message makes no sense; sending it again will not help."""
