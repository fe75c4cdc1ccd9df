"""What can go wrong with a master.

MasterError
├── PlanError       RUN/plan.json is absent or is no plan
└── ListenError     the address cannot be listened on
"""


class MasterError(Exception):
    """Base of all; the message is a sentence for the user, and the program ends with `exit_code`."""

    exit_code = 1


class PlanError(MasterError):
    """There is nothing to be master of."""

    exit_code = 2


class ListenError(MasterError):
    """The port is taken or the address is not ours."""

    exit_code = 2
