"""One offer or put: its state, its buffer's reference and its waiters. All transports use it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal

from data_plane.transport import Transfer, TransferState, TransferTimeout, TransportError

if TYPE_CHECKING:
    from data_plane.buffer_pool import PooledBuffer
    from data_plane.owner_thread import Timer

logger = logging.getLogger(__name__)

TransferKind = Literal["offer", "put"]

DATA_CHANNEL: Final = 0
CONTROL_CHANNEL: Final = 1
"""Messages of the transport itself: a probe's."""


class PostedTransfer:
    """Implements ``Transfer``. Created on any thread, finished on the owner thread.

    Attributes:
        kind: which side of a message this is.
        tag, nbytes, state, error, ended_at: see ``Transfer``.
        channel: DATA_CHANNEL, or CONTROL_CHANNEL for the transport's own messages.
        deadline: ``time.monotonic()`` at which the connection fails.
        started: ``time.monotonic()`` when its bytes could first move.
        failure: its own reason to fail, when it differs from the connection's.
        timer: the deadline's timer, once the owner thread knows the transfer.
    """

    def __init__(
        self,
        *,
        kind: TransferKind,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        transport: str,
        peer: str,
        owner_thread_id: int,
        channel: int = DATA_CHANNEL,
    ) -> None:
        self.kind: TransferKind = kind
        self.channel = channel
        self.deadline_seconds = deadline_seconds
        self.started = time.monotonic()
        self.deadline = self.started + deadline_seconds
        self.failure: TransportError | None = None
        self.timer: Timer | None = None
        self.tag = tag
        self._buffer: PooledBuffer | None = buffer.retain()
        self.nbytes = buffer.nbytes
        self._transport = transport
        self._peer = peer
        self._owner_thread_id = owner_thread_id
        self.state = TransferState.PENDING
        self.error: TransportError | None = None
        self.ended_at: float | None = None
        self._lock = threading.Lock()
        self._finished_event: threading.Event | None = None
        self._callbacks: list[Callable[[Transfer], None]] = []

    @property
    def moving_seconds(self) -> float:
        return 0.0 if self.ended_at is None else self.ended_at - self.started

    @property
    def buffer(self) -> PooledBuffer:
        """The buffer, while the transfer holds it."""
        assert self._buffer is not None
        return self._buffer

    def wait(self, timeout_seconds: float) -> None:
        """See ``Transfer.wait``. On the owner thread it would wait for itself: RuntimeError."""
        if self.state is TransferState.PENDING:
            if threading.get_ident() == self._owner_thread_id:
                raise RuntimeError("wait() on the transport's own thread; use add_done_callback")
            if not self._event().wait(timeout_seconds):
                raise TransferTimeout(
                    f"{self.kind} of tag {self.tag} ({self.nbytes} bytes) still pending after "
                    f"waiting {timeout_seconds} s",
                    transport=self._transport,
                    peer=self._peer,
                    hint=f"it goes on until its own deadline of {self.deadline_seconds} s",
                )
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        with self._lock:
            if self.state is TransferState.PENDING:
                self._callbacks.append(callback)
                return
        callback(self)

    def finish(
        self,
        error: TransportError | None,
        *,
        release_buffer: bool = True,
        skipped: bool = False,
    ) -> None:
        """Ends the transfer once; later calls do nothing but release the buffer.

        Args:
            error: why it failed, or None.
            release_buffer: False keeps the buffer from the pool: the network may still touch it.
            skipped: without an error: no message came, and none will.
        """
        if release_buffer:
            self._release_buffer()
        with self._lock:
            if self.state is not TransferState.PENDING:
                return
            self.error = error
            self.ended_at = time.monotonic()
            if error is not None:
                self.state = TransferState.FAILED
            else:
                self.state = TransferState.SKIPPED if skipped else TransferState.DONE
            callbacks, self._callbacks = self._callbacks, []
            if self._finished_event is not None:
                self._finished_event.set()
        if self.timer is not None:
            self.timer.cancel()
        for callback in callbacks:
            self._call(callback)

    def _event(self) -> threading.Event:
        with self._lock:
            if self._finished_event is None:
                self._finished_event = threading.Event()
                if self.state is not TransferState.PENDING:
                    self._finished_event.set()
            return self._finished_event

    def _release_buffer(self) -> None:
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.release()

    def _call(self, callback: Callable[[Transfer], None]) -> None:
        try:
            callback(self)
        except Exception:
            logger.exception("done callback of %s tag %d failed", self.kind, self.tag)
