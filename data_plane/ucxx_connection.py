"""A connection of the ucxx transport: matches arrived messages with offers, and fails as a whole.

UCX matches tags per worker, so the 64-bit wire tag starts with the receiver's id of the connection:
``(connection id << 1 | channel) << 32 | tag``. Ids are exchanged in the handshake.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.transport import (
    MAX_TAG,
    MessageSizeMismatch,
    PeerLost,
    Transfer,
    TransferState,
    TransferTimeout,
    TransportClosed,
    TransportError,
)
from data_plane.ucxx_endpoint_query import query_endpoint
from data_plane.ucxx_ping import PING_TAG, PONG_TAG, Pings
from data_plane.ucxx_transfer import TransferKind, UcxxTransfer
from data_plane.ucxx_worker import UCX_ERRORS, UcxxWorker

if TYPE_CHECKING:
    from data_plane.buffer_pool import PooledBuffer
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

TRANSPORT_NAME: Final = "ucxx"
MAX_CONNECTION_ID: Final = 2**31 - 1
DATA_CHANNEL: Final = 0
CONTROL_CHANNEL: Final = 1

FAREWELL_TAG: Final = 0
"""Of the control channel: why the other side closes the connection, in words."""

_MAX_FAREWELL_BYTES = 1024
_FAREWELL_SECONDS = 0.2
_GIVE_UP_SECONDS = 1.0
_NOTHING = np.empty(0, dtype=np.uint8)


def wire_tag(connection_id: int, channel: int, tag: int) -> int:
    """Returns the 64-bit UCX tag."""
    return (connection_id << 1 | channel) << 32 | tag


def split_wire_tag(wire: int) -> tuple[int, int, int]:
    """Returns (connection id, channel, tag)."""
    return wire >> 33, wire >> 32 & 1, wire & MAX_TAG


def as_ucxx_array(tensor: torch.Tensor) -> Any:
    """Wraps a 1-D uint8 tensor of host or device memory for ucxx, without a copy."""
    if tensor.numel() == 0:
        return Array(_NOTHING)
    return Array(tensor if tensor.is_cuda else tensor.numpy())


class UcxxConnection:
    """Implements ``Connection``.

    Public methods are for any thread; those marked so are for the owner thread. A failure of any
    transfer fails the connection: with one message lost, the plan that both sides follow is void.

    Attributes:
        local_id: the id that the peer's messages carry.
        remote_id: the id that the peer matches by; known after the handshake.
        on_control: receives (operation, message) of the control channel; set by the transport.
    """

    def __init__(
        self,
        *,
        worker: UcxxWorker,
        endpoint: Any,
        local_id: int,
        peer: str,
        max_unclaimed_messages: int,
        slowest_bytes_per_second: float,
        metrics: DataPlaneMetrics | None,
    ) -> None:
        self.local_id = local_id
        self.remote_id = -1
        self.on_control: Callable[[int, Any], None] | None = None
        self.endpoint: Any = endpoint
        self.worker = worker
        self._peer = peer
        self._metrics = metrics
        self._max_unclaimed_messages = max_unclaimed_messages
        self._lock = threading.Lock()
        self._offers: dict[int, UcxxTransfer] = {}
        self._unclaimed: dict[int, deque[Any]] = {}
        self._unclaimed_count = 0
        self._moving: set[UcxxTransfer] = set()
        self._error: TransportError | None = None
        self._torn_down = False
        self._closed_callbacks: list[Callable[[TransportError | None], None]] = []
        self._pings = Pings(self, slowest_bytes_per_second)
        endpoint.set_close_callback(self._on_endpoint_lost)

    @property
    def peer(self) -> str:
        return self._peer

    @property
    def transport(self) -> str:
        return TRANSPORT_NAME

    @property
    def closed(self) -> bool:
        return self._error is not None

    @property
    def error(self) -> TransportError | None:
        """Why it is closed; TransportClosed after ``close()``."""
        return self._error

    def offer(self, tag: int, buffer: PooledBuffer, deadline_seconds: float) -> Transfer:
        """See ``Connection.offer``. On a closed connection the transfer has failed already.

        Raises:
            ValueError: the tag is out of range or already on offer, or the deadline is not > 0.
        """
        with self._lock:
            if tag in self._offers:
                raise ValueError(f"tag {tag} is already on offer to {self._peer}; one at a time")
            transfer = self._new_transfer("offer", tag, buffer, deadline_seconds)
            accepted = self._error is None
            if accepted:
                self._offers[tag] = transfer
        if accepted:
            self.worker.submit(lambda: self._accept_offer(transfer))
        else:
            self._fail_unstarted(transfer)
        return transfer

    def put(
        self,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> Transfer:
        """See ``Connection.put``. On a closed connection the transfer has failed already.

        Raises:
            ValueError: the tag is out of range, or the deadline is not > 0.
        """
        return self.put_on_channel(DATA_CHANNEL, tag, buffer, deadline_seconds, ready)

    def put_on_channel(
        self,
        channel: int,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> UcxxTransfer:
        """``put`` on the data or control channel."""
        transfer = self._new_transfer("put", tag, buffer, deadline_seconds, channel)
        if self._error is not None:
            self._fail_unstarted(transfer)
        else:
            self.worker.submit(lambda: self._start_put(transfer, ready))
        return transfer

    def close(self, reason: str = "closed by this side") -> None:
        error = self._new_error(TransportClosed, reason)
        with self._lock:
            if self._error is not None:
                return
            self._error = error
        self.worker.submit(lambda: self._say_farewell(reason))

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        with self._lock:
            if not self._torn_down:
                self._closed_callbacks.append(callback)
                return
        self._call_closed(callback)

    @property
    def last_heard(self) -> float:
        return self._pings.last_heard

    def ping(self, timeout_seconds: float) -> None:
        self._pings.ask(timeout_seconds)

    @property
    def moving_bytes(self) -> int:
        """Of messages that UCX moves now, in either direction. Owner thread."""
        return sum(transfer.nbytes for transfer in self._moving)

    def lose_silent_peer(self, seconds: float) -> None:
        """Fails the connection after a ping that was not answered. Owner thread."""
        self.fail(
            self._new_error(
                PeerLost,
                f"no sign of life for {seconds:.1f} s, though it was asked for one",
                hint="the process is stopped, or the network to it is cut",
            )
        )

    def lanes(self) -> tuple[str, ...]:
        """Names of the UCX transports in use, empty when closed. Owner thread."""
        if self.endpoint is None:
            return ()
        return query_endpoint(self.endpoint.handle).transports

    def fail(self, error: TransportError) -> None:
        """Closes the connection because of ``error``. Owner thread."""
        with self._lock:
            if self._error is None:
                self._error = error
        self._tear_down(error)

    def send_control(self, operation: int, payload: bytes) -> None:
        """Sends a small message on the control channel, best effort. Owner thread."""
        if self.endpoint is None:
            return
        memory = np.frombuffer(payload, dtype=np.uint8)
        tag = libucxx.UCXXTag(wire_tag(self.remote_id, CONTROL_CHANNEL, operation))
        try:
            request = self.endpoint.tag_send(Array(memory), tag)
        except UCX_ERRORS as error:
            self._fail_with_ucx_error(error)
            return
        self.worker.track(request, memory, lambda error: None)

    def deliver(self, channel: int, tag: int, message: Any) -> None:
        """Takes an arrived message for this connection. Owner thread."""
        self._pings.last_heard = time.monotonic()
        if self._torn_down:
            self.worker.discard(message)
        elif channel == CONTROL_CHANNEL:
            if tag == FAREWELL_TAG:
                self._take_farewell(message)
            elif tag in (PING_TAG, PONG_TAG):
                self.worker.discard(message)
                self._pings.take(tag)
            elif self.on_control is not None:
                self.on_control(tag, message)
            else:
                self.worker.discard(message)
        else:
            self._deliver_data(tag, message)

    def _say_farewell(self, reason: str) -> None:
        """Tells the peer why, then tears down; at the latest after _FAREWELL_SECONDS, since a peer
        that is stopped takes nothing."""
        if self._torn_down or self.remote_id < 0:
            self._tear_down(None)
            return
        self.worker.call_at(time.monotonic() + _FAREWELL_SECONDS, lambda: self._tear_down(None))
        memory = np.frombuffer(reason.encode()[:_MAX_FAREWELL_BYTES] or b" ", dtype=np.uint8)
        tag = libucxx.UCXXTag(wire_tag(self.remote_id, CONTROL_CHANNEL, FAREWELL_TAG))
        try:
            request = self.endpoint.tag_send(Array(memory), tag)
        except UCX_ERRORS:
            self._tear_down(None)
            return
        self.worker.track(request, memory, lambda error: self._tear_down(None))

    def _take_farewell(self, message: Any) -> None:
        if message.length > _MAX_FAREWELL_BYTES:
            self.worker.discard(message)
            return
        body = np.zeros(max(message.length, 1), dtype=np.uint8)
        request = self.worker.ucp.tag_recv_with_handle(Array(body), message)

        def on_complete(error: Exception | None) -> None:
            if error is None and not self._torn_down:
                reason = body.tobytes().decode(errors="replace")
                self.fail(self._new_error(PeerLost, f"closed by the peer: {reason}"))

        self.worker.track(request, body, on_complete)

    def _deliver_data(self, tag: int, message: Any) -> None:
        with self._lock:
            transfer = self._offers.pop(tag, None)
        if transfer is not None:
            self._start_receive(transfer, message)
            return
        self._unclaimed.setdefault(tag, deque()).append(message)
        self._unclaimed_count += 1
        if self._unclaimed_count > self._max_unclaimed_messages:
            self.fail(
                self._new_error(
                    TransportError,
                    f"{self._unclaimed_count} messages wait for an offer, "
                    f"max_unclaimed_messages={self._max_unclaimed_messages}",
                    hint="the peers disagree about the plan, or receives are offered too late",
                )
            )

    def _accept_offer(self, transfer: UcxxTransfer) -> None:
        """Owner thread: starts the deadline and looks whether the message is here already."""
        if transfer.state is not TransferState.PENDING:
            return
        self._start_deadline(transfer)
        waiting = self._unclaimed.get(transfer.tag)
        if not waiting:
            return
        with self._lock:
            mine = self._offers.get(transfer.tag) is transfer
            if mine:
                del self._offers[transfer.tag]
        if mine:
            message = waiting.popleft()
            self._unclaimed_count -= 1
            if not waiting:
                del self._unclaimed[transfer.tag]
            self._start_receive(transfer, message)

    def _start_receive(self, transfer: UcxxTransfer, message: Any) -> None:
        if message.length != transfer.nbytes:
            self._refuse_size(transfer, message)
            return
        transfer.started = time.monotonic()
        array = as_ucxx_array(transfer.buffer.tensor)
        try:
            request = self.worker.ucp.tag_recv_with_handle(array, message)
        except UCX_ERRORS as error:
            self._end(transfer, self._new_error(PeerLost, f"receive failed: {error}"))
            self._fail_with_ucx_error(error)
            return
        self._track(transfer, request, array)

    def _refuse_size(self, transfer: UcxxTransfer, message: Any) -> None:
        what = f"message with tag {transfer.tag} has {message.length} bytes, offered were "
        what += f"{transfer.nbytes}"
        hint = "the peers disagree about the plan"
        self._end(transfer, self._new_error(MessageSizeMismatch, what, hint=hint))
        self.fail(self._new_error(PeerLost, f"connection closed: {what}", hint=hint))
        # After the endpoint is closed, so that the bytes are not sent just to be thrown away.
        self.worker.discard(message)

    def _start_put(self, transfer: UcxxTransfer, ready: Callable[[], bool] | None) -> None:
        if self._error is not None:
            self._fail_unstarted(transfer)
            return
        if ready is not None and not ready():
            if time.monotonic() > transfer.deadline:
                self._on_deadline(transfer)
                self._fail_unstarted(transfer)
            else:
                # Asked again on the owner thread's next turn: a kernel in front of a message is
                # worth polling for, and the thread polls on a GPU anyway.
                self.worker.submit(lambda: self._start_put(transfer, ready))
            return
        array = as_ucxx_array(transfer.buffer.tensor)
        try:
            request = self.endpoint.tag_send(array, libucxx.UCXXTag(transfer.wire_tag))
        except UCX_ERRORS as error:
            self._end(transfer, self._new_error(PeerLost, f"send failed: {error}"))
            self._fail_with_ucx_error(error)
            return
        self._track(transfer, request, array)
        if transfer.state is TransferState.PENDING:
            self._start_deadline(transfer)

    def _track(self, transfer: UcxxTransfer, request: Any, array: Any) -> None:
        self._moving.add(transfer)
        self.worker.track(
            request, (array, transfer), lambda error: self._on_complete(transfer, error)
        )

    def _on_complete(self, transfer: UcxxTransfer, error: Exception | None) -> None:
        self._moving.discard(transfer)
        if error is None and transfer.failure is None:
            if transfer.kind == "offer":
                self._pings.last_heard = time.monotonic()
            self._end(transfer, None)
            return
        if not self._torn_down:
            self._fail_with_ucx_error(error)
        self._end(transfer, transfer.failure or self._later_error())

    def _end(
        self, transfer: UcxxTransfer, error: TransportError | None, *, release_buffer: bool = True
    ) -> None:
        if self._metrics is not None and transfer.state is TransferState.PENDING:
            self._metrics.transfer_ended(
                kind=transfer.kind,
                peer=self._peer,
                transport=TRANSPORT_NAME,
                nbytes=transfer.nbytes,
                seconds=time.monotonic() - transfer.started,
                error=error,
            )
        transfer.finish(error, release_buffer=release_buffer)

    def _start_deadline(self, transfer: UcxxTransfer) -> None:
        transfer.timer = self.worker.call_at(transfer.deadline, lambda: self._on_deadline(transfer))

    def _on_deadline(self, transfer: UcxxTransfer) -> None:
        if transfer.state is not TransferState.PENDING:
            return
        what = (
            f"{transfer.kind} of tag {transfer.tag} ({transfer.nbytes} bytes) not done within "
            f"{transfer.deadline_seconds} s"
        )
        hint = "the peer is stopped, cut off or too slow"
        transfer.failure = self._new_error(TransferTimeout, what, hint=hint)
        self.fail(self._new_error(PeerLost, f"connection closed: {what}", hint=hint))

    def _on_endpoint_lost(self) -> None:
        # UCX calls this in the middle of its progress, where an endpoint must not be closed.
        self.worker.submit(self._on_peer_lost)

    def _on_peer_lost(self) -> None:
        if not self._torn_down:
            self.fail(
                self._new_error(PeerLost, "connection lost", hint="the peer died or closed it")
            )

    def _fail_with_ucx_error(self, error: Exception | None) -> None:
        self.fail(
            self._new_error(
                PeerLost,
                f"connection lost: {type(error).__name__}: {error}",
                hint="the peer died or closed it",
            )
        )

    def _tear_down(self, error: TransportError | None) -> None:
        """Closes the endpoint and ends every transfer. Owner thread; once.

        Offers that no message matched end now. The others end when UCX has completed their
        requests, which closing the endpoint brings about: only then are their buffers safe.
        """
        with self._lock:
            if self._torn_down:
                return
            self._torn_down = True
            offers, self._offers = list(self._offers.values()), {}
            closed_callbacks, self._closed_callbacks = self._closed_callbacks, []
        self._close_endpoint()
        for transfer in offers:
            self._end(transfer, transfer.failure or self._later_error())
        for waiting in self._unclaimed.values():
            for message in waiting:
                self.worker.discard(message)
        self._unclaimed.clear()
        if self._moving:
            self.worker.call_at(time.monotonic() + _GIVE_UP_SECONDS, self._give_up)
        logger.info("connection %d with %s closed: %s", self.local_id, self._peer, self._error)
        for callback in closed_callbacks:
            self._call_closed(callback)

    def _close_endpoint(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        endpoint.remove_close_callback()
        try:
            # Forced (error handling is on), so it returns at once, whatever the peer does.
            endpoint.close_blocking(0, 1)
        except UCX_ERRORS as error:
            logger.warning("closing the endpoint to %s: %s", self._peer, error)

    def _give_up(self) -> None:
        """Reports transfers that UCX never completed; their buffers stay out of the pool."""
        for transfer in list(self._moving):
            logger.error(
                "%s of tag %d with %s: UCX did not complete it %s s after the connection closed; "
                "its buffer of %d bytes is withheld until it does",
                transfer.kind,
                transfer.tag,
                self._peer,
                _GIVE_UP_SECONDS,
                transfer.nbytes,
            )
            self._end(transfer, transfer.failure or self._later_error(), release_buffer=False)

    def _fail_unstarted(self, transfer: UcxxTransfer) -> None:
        self._end(transfer, self._later_error())

    def _later_error(self) -> TransportError:
        """The error of a transfer that did not itself make the connection fail."""
        assert self._error is not None
        if isinstance(self._error, TransportClosed | PeerLost):
            return self._error
        return self._new_error(PeerLost, f"connection failed: {self._error}")

    def _new_error(
        self, error_class: type[TransportError], message: str, *, hint: str = ""
    ) -> TransportError:
        return error_class(message, transport=TRANSPORT_NAME, peer=self._peer, hint=hint)

    def _new_transfer(
        self,
        kind: TransferKind,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        channel: int = DATA_CHANNEL,
    ) -> UcxxTransfer:
        if not 0 <= tag <= MAX_TAG:
            raise ValueError(f"tag is {tag}; valid: 0 to {MAX_TAG}")
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; give more than 0")
        return UcxxTransfer(
            kind=kind,
            tag=tag,
            buffer=buffer,
            deadline_seconds=deadline_seconds,
            transport=TRANSPORT_NAME,
            peer=self._peer,
            owner_thread_id=self.worker.thread_id,
            wire_tag=wire_tag(self.remote_id, channel, tag) if kind == "put" else 0,
        )

    def _call_closed(self, callback: Callable[[TransportError | None], None]) -> None:
        try:
            callback(None if isinstance(self._error, TransportClosed) else self._error)
        except Exception:
            logger.exception("closed callback of the connection with %s failed", self._peer)
