"""Logs of a program whose disk is full, or full for a while."""

import errno
import io
import logging

import pytest
import structlog

from aimaster.telemetry.logs import set_up_logs


class Disk(io.StringIO):
    """A stream on a disk that may be full."""

    full = False

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


@pytest.fixture
def disk():
    before = structlog.get_config(), logging.getLogger().handlers[:], logging.getLogger().level
    out = Disk()
    set_up_logs(stream=out, role="test")
    yield out
    structlog.configure(**before[0])
    logging.getLogger().handlers[:] = before[1]
    logging.getLogger().setLevel(before[2])
    structlog.contextvars.clear_contextvars()


def test_a_full_disk_costs_log_lines_and_not_the_program(disk, capsys):
    """Neither structlog's lines nor the standard library's raise; with room again, how many were lost stands before the next one."""
    log = structlog.get_logger()
    disk.full = True
    log.info("lost")
    logging.getLogger("other").warning("lost too")
    disk.full = False
    log.info("kept")
    lines = disk.getvalue().splitlines()
    assert lines[0] == "(2 log lines could not be written)"
    assert '"event":"kept"' in lines[1]
    assert not capsys.readouterr().err
