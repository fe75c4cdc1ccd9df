"""What an uncaught Python exception says of itself: the program's own fault, its configuration, a wait that ended, or only an echo of children."""

from __future__ import annotations

import re

from aimaster.catalogue.blocks import Traceback
from aimaster.wire.health import Role

_LOADS_CHECKPOINT = re.compile(
    r"\bin \w*load\w*(?:state_dict|checkpoint|parameter_state|_ckpt)\w*|load_state_dict|load_checkpoint"
)
_SETTINGS = re.compile(
    r"/(?:config|configs|configuration\w*|config_utils|arguments?|arg_utils|training_args\w*|settings|validators?|hparams)(?:/[^\"]*)?\.py\""
    r"|/(?:configs?|arguments|settings)/[^\"]*\"|, in (?:__post_init__|validate_\w+|_validate\w*|check_\w*(?:args|config)\w*|parse_args\w*)$"
)
"""Files and functions that read and check what the user has set."""
_REFUSES = re.compile(r"(?:^|\.)(?:ValueError|AssertionError|TypeError|KeyError|NotImplementedError|ValidationError)$")
_WAITS_ONLY = re.compile(r"(?:^|\.)(?:\w*Timeout\w*|Empty|CancelledError)$")
_LAUNCHER = re.compile(
    r"(?:^|\.)(?:CalledProcessError|SystemExit|KeyboardInterrupt|ProcessRaisedException|ChildFailedError)$"
)


def judge_exception(block: Traceback) -> tuple[Role, int, str]:
    """Role, weight and category of the exception that ended a traceback."""
    if _LAUNCHER.search(block.exception):
        return "follower", 12, "unknown"
    if _WAITS_ONLY.search(block.exception):
        return "self", 30, "app.exception"
    if _LOADS_CHECKPOINT.search(block.text()) or _checks_settings(block):
        return "self", 58, "app.config"
    return "self", 50, "app.exception"


def _checks_settings(block: Traceback) -> bool:
    """Whether code whose work is to check settings raised it: the innermost frame tells."""
    frames = [line for line in block.text().splitlines() if line.lstrip().startswith('File "')]
    return bool(frames) and _REFUSES.search(block.exception) is not None and _SETTINGS.search(frames[-1]) is not None
