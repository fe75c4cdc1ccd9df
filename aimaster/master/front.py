"""Watches the front process: its pidfd becomes readable the moment it ends, whatever ended it."""

import asyncio
import os


async def wait_for_end(pid: int) -> None:
    """Return when the process has ended; at once when there is none."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
