"""The calls of PAI's EasyCKPT, so that a training script written for it saves through this engine with one changed import.

    initialize_easyckpt(save_mem_interval=1, save_storage_interval=100, max_ckpt_num=5, log_file_path=None)
    iteration = load_checkpoint(model, optimizer, scheduler)
    save_checkpoint_if_needed(iteration, model, optimizer, scheduler)

Storage is `save_path`, else the environment's EASYCKPT_RESUME_PATH, else ./checkpoints. Ranks are those of torch.distributed, else RANK and
WORLD_SIZE, as launchers set them. Models given as a list (pipeline chunks) are saved as a list.
"""

from __future__ import annotations

import logging
import os
from functools import partial
from typing import Any

import torch.distributed as dist

from easyckpt import events
from easyckpt.engine import Checkpointer
from easyckpt.errors import EasyckptError

_open: dict[str, Any] = {}


def initialize_easyckpt(
    save_mem_interval: int = 1,
    save_storage_interval: int = 100,
    max_ckpt_num: int = 5,
    log_file_path: str | None = None,
    *,
    save_path: str | None = None,
) -> Checkpointer:
    """Opens the engine of this rank; a second call replaces the first."""
    if save_mem_interval < 1 or save_storage_interval < 1:
        raise EasyckptError("both intervals are counted in steps and are at least 1")
    finalize_easyckpt()
    listener = events.log
    if log_file_path is not None:
        _open["handler"] = handler = logging.FileHandler(log_file_path)
        listener = partial(_log_twice, _logger_of(handler))
    storage = save_path or os.environ.get("EASYCKPT_RESUME_PATH") or "checkpoints"
    rank, ranks = _place()
    engine = Checkpointer(
        storage,
        rank=rank,
        ranks=ranks,
        keep=max_ckpt_num,
        flush_every=None,
        on_event=listener,
    )
    _open.update(engine=engine, memory=save_mem_interval, storage=save_storage_interval)
    return engine


def save_checkpoint_if_needed(iteration: int, model: Any, optimizer: Any = None, scheduler: Any = None) -> bool:
    """Saves to memory, to storage, or not at all, as the two intervals say. True if it was saved."""
    engine = _engine()
    to_storage = iteration % _open["storage"] == 0
    if not to_storage and iteration % _open["memory"]:
        return False
    return engine.save(iteration, _state(model, optimizer, scheduler, iteration), flush=to_storage)


def load_checkpoint(model: Any, optimizer: Any = None, scheduler: Any = None, *, strict: bool = True) -> int:
    """Fills model, optimizer and scheduler from the nearest good copy; returns its iteration, 0 when there is none."""
    restored = _engine().restore(_state(model, optimizer, scheduler, 0), strict=strict)
    return restored.step if restored is not None else 0


def finalize_easyckpt() -> None:
    """Waits for the last flush and closes."""
    engine, handler = _open.pop("engine", None), _open.pop("handler", None)
    if engine is not None:
        engine.close()
    if handler is not None:
        handler.close()


def _logger_of(handler: logging.Handler) -> logging.Logger:
    """Of its own, so that the file has every event and the console no more than before."""
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger = logging.Logger("easyckpt.pai", logging.DEBUG)  # noqa: LOG001 - in no hierarchy
    logger.addHandler(handler)
    return logger


def _log_twice(logger: logging.Logger, event: events.Event) -> None:
    events.log(event)
    events.log(event, logger)


def _place() -> tuple[int, int]:
    """(rank, ranks) of this process: what torch.distributed says once it is there, else the launcher's variables."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _engine() -> Checkpointer:
    engine = _open.get("engine")
    if not isinstance(engine, Checkpointer):
        raise EasyckptError("call initialize_easyckpt first")
    return engine


def _state(model: Any, optimizer: Any, scheduler: Any, iteration: int) -> dict[str, Any]:
    given = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    return {name: value for name, value in given.items() if value is not None} | {"iteration": iteration}
