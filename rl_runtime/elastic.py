"""The re-formable reduction: one gloo group per epoch, summed out of place, gone with its epoch.

    host(epoch) -> address          the epoch's first rank opens its store on a free port
    reduce(bucket, word) -> sum     forms the group at the first step of an epoch, then uses it again
    close()                         before the process ends: a live group aborts it

Whatever goes wrong in a collective is a ReductionAborted and takes the group with it: the caller keeps its own gradients and asks
the controller. A killed peer wakes the others at once (its sockets close); a hung one at the group timeout. While they wait, they
beat: so only the hung one falls silent. Before a group is made, all ranks meet in the store by short polls, so that a peer that
died on the way costs no timeout: `still_wanted` is asked now and then, and says no when the controller has gone on.
"""

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import structlog
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore

from aimaster.wire.training import Reduce

POLL_SECONDS = 0.01
SLICE_SECONDS = 0.5
ASK_SECONDS = 0.5
STORE_SECONDS = 5.0

log = structlog.get_logger("elastic")


class ReductionAborted(Exception):  # noqa: N818 - it is no error of this member
    """The sum could not be made; the group is gone, the caller's own gradients are as they were."""


class ElasticGroup:
    """The group of the newest epoch this member has taken part in."""

    def __init__(self, *, host: str, beat: Callable[[], None]) -> None:
        self._host = host
        self._beat = beat
        self._epoch = -1
        """Of the group and of the store that is hosted."""
        self._store: TCPStore | None = None
        self._group: Any = None  # torch's stubs know no collectives of a group by itself
        self._hosted: TCPStore | None = None
        self._hosted_epoch = -1

    def host(self, epoch: int) -> str:
        """Open the store of `epoch` and return its address; asked again, return the same."""
        if self._hosted is None or self._hosted_epoch != epoch:
            if self._hosted is not None:
                self.close()
            listener = socket.create_server((self._host, 0))
            port = listener.getsockname()[1]
            self._hosted = TCPStore(
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=STORE_SECONDS),
                master_listen_fd=listener.detach(),  # torch by itself would listen on every interface
            )
            self._hosted_epoch = epoch
        return f"{self._host}:{self._hosted.port}"

    def reduce(self, bucket: Tensor, word: Reduce, *, still_wanted: Callable[[], bool] = lambda: True) -> Tensor:
        """Return the sum of all members' buckets as a new tensor; `bucket` is not touched."""
        if word.world == 1:
            self._end_group()
            return bucket.clone()
        give_up_at = time.monotonic() + word.timeout_seconds
        try:
            if self._group is None or self._epoch != word.epoch:
                self._end_group()
                self._group = self._form(word, give_up_at, still_wanted)
                self._epoch = word.epoch
            total = bucket.clone()
            self._wait(self._group.allreduce([total]), give_up_at + SLICE_SECONDS)
            return total
        except RuntimeError as error:
            # gloo says everything by a plain RuntimeError: closed connections, timeouts, a store that is gone.
            self._end_group()
            raise ReductionAborted(f"{type(error).__name__}: {str(error)[:300]}") from error
        except ReductionAborted:
            self._end_group()
            raise

    def close(self) -> None:
        """End group and store."""
        self._end_group()
        self._hosted, self._hosted_epoch = None, -1

    def _end_group(self) -> None:
        self._group, self._store, self._epoch = None, None, -1

    def _form(self, word: Reduce, give_up_at: float, still_wanted: Callable[[], bool]) -> Any:
        if self._hosted_epoch != word.epoch:
            self._hosted, self._hosted_epoch = None, -1
        self._store = self._open_store(word, give_up_at)
        self._meet(self._store, word, give_up_at, still_wanted)
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001 - the only way to name the interface
        options._timeout = timedelta(seconds=word.timeout_seconds)  # noqa: SLF001
        options._devices = [ProcessGroupGloo.create_device(hostname=self._host)]  # noqa: SLF001
        store = PrefixStore(f"epoch-{word.epoch}", self._store)
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(ProcessGroupGloo(store, word.rank, word.world, options))
            except RuntimeError as error:
                made.append(error)

        # In a thread of its own, because nothing wakes it before its timeout when a peer dies right here.
        thread = threading.Thread(target=connect, name="group-connect", daemon=True)
        thread.start()
        self._poll(lambda: bool(made), give_up_at, still_wanted, waiting_for="the peers' connections")
        thread.join()
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]

    def _open_store(self, word: Reduce, give_up_at: float) -> TCPStore:
        if self._hosted is not None and self._hosted_epoch == word.epoch:
            return self._hosted
        host, _, port = word.address.rpartition(":")
        self._beat()
        # A plain connection first: it fails at once when the host is gone, where the store's client would try for its whole timeout.
        try:
            socket.create_connection(
                (host, int(port)), timeout=max(0.1, min(2.0, give_up_at - time.monotonic()))
            ).close()
        except OSError as error:
            raise ReductionAborted(
                f"the store of epoch {word.epoch} at {word.address} is not there: {error}"
            ) from error
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=STORE_SECONDS))

    def _meet(self, store: TCPStore, word: Reduce, give_up_at: float, still_wanted: Callable[[], bool]) -> None:
        """Wait until all ranks of the epoch are here."""
        names = [f"here-{word.epoch}-{rank}" for rank in range(word.world)]
        store.set(names[word.rank], "1")
        self._poll(lambda: store.check(names), give_up_at, still_wanted, waiting_for="the peers to come")

    def _poll(
        self, ready: Callable[[], bool], give_up_at: float, still_wanted: Callable[[], bool], *, waiting_for: str
    ) -> None:
        ask_at = time.monotonic() + ASK_SECONDS
        while not ready():
            now = time.monotonic()
            if now > give_up_at:
                raise ReductionAborted(f"gave up waiting for {waiting_for}")
            if now > ask_at:
                self._beat()
                if not still_wanted():
                    raise ReductionAborted(f"the controller went on while this member waited for {waiting_for}")
                ask_at = time.monotonic() + ASK_SECONDS
            time.sleep(POLL_SECONDS)

    def _wait(self, work: Any, give_up_at: float) -> None:
        """Wait for a collective with a beat between slices; raises RuntimeError when it fails."""
        while True:
            with contextlib.suppress(RuntimeError):
                work.wait(timedelta(seconds=SLICE_SECONDS))
            if work.is_completed():
                work.wait()  # its own error, if it has one
                return
            self._beat()
            if time.monotonic() > give_up_at:
                # gloo's own timeout comes first; this is for a collective that ignores it.
                raise ReductionAborted("the collective did not end at its timeout")
