"""A connection of the ucxx transport: matches arrived messages with offers.

UCX matches tags per worker, so the 64-bit wire tag starts with the receiver's id of the connection:
``(connection id << 1 | channel) << 32 | tag``. Ids are exchanged in the handshake.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import torch
from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from data_plane.base_connection import MAX_FAREWELL_BYTES, BaseConnection
from data_plane.pings import PING_TAG, PONG_TAG
from data_plane.posted_transfer import CONTROL_CHANNEL, DATA_CHANNEL, PostedTransfer
from data_plane.transport import (
    MAX_TAG,
    NetworkRestarted,
    PeerClosed,
    PeerLost,
    PeerReset,
    TransportClosed,
    TransportError,
)
from data_plane.ucxx_endpoint_query import query_endpoint
from data_plane.ucxx_worker import UCX_ERRORS, UcxxWorker

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

TRANSPORT_NAME: Final = "ucxx"

FAREWELL_TAG: Final = 0
"""Of the control channel: why the other side closes the connection, in words."""

SKIP_TAG: Final = 34
"""Of the control channel: the tag, big-endian, of a message that will not come."""

_FAREWELL_SECONDS = 0.2
_GIVE_UP_SECONDS = 1.0
_SKIP_BYTES = 4
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


class UcxxConnection(BaseConnection):
    """Implements ``Connection``.

    Attributes:
        local_id: the id that the peer's messages carry.
        remote_id: the id that the peer matches by; known after the handshake.
        on_control: receives (operation, message) of the control channel; set by the transport.
    """

    transport_name: ClassVar[str] = TRANSPORT_NAME
    worker: UcxxWorker

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
        super().__init__(
            worker=worker,
            local_id=local_id,
            peer=peer,
            slowest_bytes_per_second=slowest_bytes_per_second,
            metrics=metrics,
        )
        self.remote_id = -1
        self.on_control: Callable[[int, Any], None] | None = None
        self.endpoint: Any = endpoint
        self._max_unclaimed_messages = max_unclaimed_messages
        self._unclaimed: dict[int, deque[Any]] = {}
        self._unclaimed_count = 0
        self._skipped: set[int] = set()
        self._moving: set[PostedTransfer] = set()
        endpoint.set_close_callback(self._on_endpoint_lost)

    @property
    def greeted(self) -> bool:
        return self.remote_id >= 0

    @property
    def moving_bytes(self) -> int:
        return sum(transfer.nbytes for transfer in self._moving)

    def lanes(self) -> tuple[str, ...]:
        """Names of the UCX transports in use, empty when closed. Owner thread."""
        if self.endpoint is None:
            return ()
        return query_endpoint(self.endpoint.handle).transports

    def send_control(self, operation: int, payload: bytes) -> None:
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
            elif tag == SKIP_TAG:
                self._take_skip(message)
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
        memory = np.frombuffer(reason.encode()[:MAX_FAREWELL_BYTES] or b" ", dtype=np.uint8)
        tag = libucxx.UCXXTag(wire_tag(self.remote_id, CONTROL_CHANNEL, FAREWELL_TAG))
        try:
            request = self.endpoint.tag_send(Array(memory), tag)
        except UCX_ERRORS:
            self._tear_down(None)
            return
        self.worker.track(request, memory, lambda error: self._tear_down(None))

    def _take_farewell(self, message: Any) -> None:
        def close(body: bytes) -> None:
            self.fail(self._new_error(PeerClosed, body.decode(errors="replace")))

        self._read_control(message, range(MAX_FAREWELL_BYTES + 1), close)

    def _take_skip(self, message: Any) -> None:
        def skip(body: bytes) -> None:
            tag = int.from_bytes(body, "big")
            if not self._skip_offer(tag):
                self._skipped.add(tag)
                self._check_unclaimed()

        self._read_control(message, range(_SKIP_BYTES, _SKIP_BYTES + 1), skip)

    def _read_control(self, message: Any, lengths: range, then: Callable[[bytes], None]) -> None:
        """Receives a control message of a valid length; ``then`` gets its bytes."""
        if message.length not in lengths:
            self.worker.discard(message)
            return
        body = np.zeros(max(message.length, 1), dtype=np.uint8)
        request = self.worker.ucp.tag_recv_with_handle(Array(body), message)

        def on_complete(error: Exception | None) -> None:
            if error is None and not self._torn_down:
                then(body.tobytes())

        self.worker.track(request, body, on_complete)

    def _send_skip(self, tag: int) -> None:
        self.send_control(SKIP_TAG, tag.to_bytes(_SKIP_BYTES, "big"))

    def _deliver_data(self, tag: int, message: Any) -> None:
        with self._lock:
            transfer = self._offers.pop((DATA_CHANNEL, tag), None)
        if transfer is not None:
            self._start_receive(transfer, message)
            return
        self._unclaimed.setdefault(tag, deque()).append(message)
        self._unclaimed_count += 1
        self._check_unclaimed()

    def _check_unclaimed(self) -> None:
        """Fails the connection if more waits for offers than a peer can have sent by the plan."""
        waiting = self._unclaimed_count + len(self._skipped)
        if waiting > self._max_unclaimed_messages:
            self.fail(
                self._new_error(
                    TransportError,
                    f"{waiting} messages wait for an offer, "
                    f"max_unclaimed_messages={self._max_unclaimed_messages}",
                    hint="the peers disagree about the plan, or receives are offered too late",
                )
            )

    def _accept_offer(self, transfer: PostedTransfer) -> None:
        """Looks whether the message is here already, or will not come."""
        if transfer.channel == DATA_CHANNEL and transfer.tag in self._skipped:
            self._skipped.discard(transfer.tag)
            self._skip_offer(transfer.tag)
            return
        waiting = self._unclaimed.get(transfer.tag)
        if not waiting:
            return
        place = (DATA_CHANNEL, transfer.tag)
        with self._lock:
            mine = self._offers.get(place) is transfer
            if mine:
                del self._offers[place]
        if mine:
            message = waiting.popleft()
            self._unclaimed_count -= 1
            if not waiting:
                del self._unclaimed[transfer.tag]
            self._start_receive(transfer, message)

    def _start_receive(self, transfer: PostedTransfer, message: Any) -> None:
        if message.length != transfer.nbytes:
            self._refuse_size(transfer, message.length)
            # After the endpoint is closed, so that the bytes are not sent just to be thrown away.
            self.worker.discard(message)
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

    def _send(self, transfer: PostedTransfer) -> None:
        array = as_ucxx_array(transfer.buffer.tensor)
        tag = wire_tag(self.remote_id, transfer.channel, transfer.tag)
        try:
            request = self.endpoint.tag_send(array, libucxx.UCXXTag(tag))
        except UCX_ERRORS as error:
            self._end(transfer, self._new_error(PeerLost, f"send failed: {error}"))
            self._fail_with_ucx_error(error)
            return
        self._track(transfer, request, array)

    def _track(self, transfer: PostedTransfer, request: Any, array: Any) -> None:
        self._moving.add(transfer)
        self.worker.track(
            request, (array, transfer), lambda error: self._on_complete(transfer, error)
        )

    def _on_complete(self, transfer: PostedTransfer, error: Exception | None) -> None:
        self._moving.discard(transfer)
        if error is None and transfer.failure is None:
            if transfer.kind == "offer":
                self._pings.last_heard = time.monotonic()
            self._end(transfer, None)
            return
        if not self._torn_down:
            self._fail_with_ucx_error(error)
        self._end(transfer, transfer.failure or self._later_error())

    def _on_endpoint_lost(self) -> None:
        # UCX calls this in the middle of its progress, where an endpoint must not be closed.
        self.worker.submit(self._on_peer_lost)

    def _on_peer_lost(self) -> None:
        if self._torn_down:
            return
        try:
            self.endpoint.raise_on_error()
        except UCX_ERRORS as error:
            self._fail_with_ucx_error(error)
            return
        self.fail(self._new_error(PeerLost, "connection lost", hint="the peer died or closed it"))

    def _fail_with_ucx_error(self, error: Exception | None) -> None:
        self.fail(
            self._new_error(
                PeerReset if isinstance(error, libucxx.UCXConnectionResetError) else PeerLost,
                f"connection lost: {type(error).__name__}: {error}",
                hint="the peer died or closed it",
            )
        )

    def _disconnect(self, offers: list[PostedTransfer]) -> None:
        """Closes the endpoint. Offers that no message matched end now. The others end when UCX has
        completed their requests, which closing the endpoint brings about: only then are their
        buffers safe."""
        self._close_endpoint()
        if not isinstance(self._error, TransportClosed | PeerClosed | NetworkRestarted):
            self.worker.check_shared_memory()
        for transfer in offers:
            self._end(transfer, transfer.failure or self._later_error())
        for waiting in self._unclaimed.values():
            for message in waiting:
                self.worker.discard(message)
        self._unclaimed.clear()
        if self._moving:
            self.worker.call_at(time.monotonic() + _GIVE_UP_SECONDS, self._give_up)

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
