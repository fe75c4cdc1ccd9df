"""Starts one member: `python -m rl_runtime.launch controller|policy|rollout`. The environment says the rest.

Parse first, import heavy things after: a typo is told in milliseconds. One thread a role: spinning threads of several processes on
shared cores cost many times what they gain.
"""

import os
import sys
from pathlib import Path

ROLES = ("controller", "policy", "rollout")


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1] not in ROLES:
        print(f"usage: python -m rl_runtime.launch {'|'.join(ROLES)}", file=sys.stderr)  # noqa: T201
        return 2
    role = sys.argv[1]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from aimaster.wire.places import ENV_RUN_DIR

    if ENV_RUN_DIR not in os.environ:
        print(f"{ENV_RUN_DIR} is not set: members are started by `aimaster run`", file=sys.stderr)  # noqa: T201
        return 2
    if role == "controller":
        from rl_runtime.controller import serve

        return serve.main(Path(os.environ[ENV_RUN_DIR]))
    if role == "policy":
        from rl_runtime.policy.main import run_policy as run
    else:
        from rl_runtime.rollout.main import run_rollout as run
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
