"""A connection of the ucxx transport: offers, puts and news, by tags that its keys make.

An offer is entered with the worker's arrivals under the tag that its message will carry. News are
the small messages of the transport itself: each direction numbers its own, and the next one is
always expected.
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

from data_plane.base_connection import (
    CLOSE_NOTICE,
    MAX_CLOSE_NOTICE_BYTES,
    BaseConnection,
    nothing,
)
from data_plane.greeting import HEADER_BYTES, BadGreeting, Greeting, decode_header
from data_plane.posted_transfer import DATA_CHANNEL, PostedTransfer
from data_plane.proof import Ends, same
from data_plane.transport import (
    Address,
    NetworkRestarted,
    PeerClosed,
    PeerLost,
    PeerReset,
    TransportClosed,
    TransportError,
)
from data_plane.ucxx.arrivals import Arrivals, MessageDropped
from data_plane.ucxx.endpoint_query import query_endpoint
from data_plane.ucxx.wire_tags import NEWS_CHANNEL, NEWS_CODE_BYTES, WireTags
from data_plane.ucxx.worker import UCX_ERRORS, UcxxWorker

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

TRANSPORT_NAME: Final = "ucxx"

SKIP: Final = 34
"""Operation of news: the tag, big-endian, of a message that will not come."""

_CLOSE_NOTICE_SECONDS = 0.2
_GIVE_UP_SECONDS = 1.0
_SKIP_BYTES = 8
_NEWS_BYTES = range(1 + NEWS_CODE_BYTES, 1 + MAX_CLOSE_NOTICE_BYTES + NEWS_CODE_BYTES + 1)
_MAX_SKIPPED = 16384
_MAX_TAKEN = 4096
_NOTHING = np.empty(0, dtype=np.uint8)


def as_ucxx_array(tensor: torch.Tensor) -> Any:
    """Wraps a 1-D uint8 tensor of host or device memory for ucxx, without a copy."""
    if tensor.numel() == 0:
        return Array(_NOTHING)
    return Array(tensor if tensor.is_cuda else tensor.numpy())


class UcxxConnection(BaseConnection):
    """Implements ``Connection``.

    Args:
        endpoint: UCX's, connected.
        arrivals: of the worker.
        worker, peer, slowest_bytes_per_second, metrics: see ``BaseConnection``.
    """

    transport_name: ClassVar[str] = TRANSPORT_NAME
    worker: UcxxWorker

    def __init__(
        self,
        worker: UcxxWorker,
        endpoint: Any,
        peer: str,
        arrivals: Arrivals,
        slowest_bytes_per_second: float,
        metrics: DataPlaneMetrics | None,
    ) -> None:
        super().__init__(worker, peer, slowest_bytes_per_second, metrics)
        self.endpoint: Any = endpoint
        self._arrivals = arrivals
        self._outgoing: WireTags | None = None
        self._incoming: WireTags | None = None
        self._news_wire: int | None = None
        self._news_sent = self._news_taken = 0
        self._skipped: set[int] = set()
        # Tags on the wire of the latest messages, of which no second one may come.
        self._taken: deque[int] = deque()
        endpoint.set_close_callback(self._on_endpoint_lost)

    def send_greeting(self, greeting: Greeting, on_sent: Callable[[], None] = nothing) -> None:
        memory = np.frombuffer(greeting.encode(), dtype=np.uint8)
        self._stream("stream_send", memory, on_sent)

    def receive_greeting(
        self, on_greeting: Callable[[Greeting], None], on_bad: Callable[[ValueError], None]
    ) -> None:
        head = np.zeros(HEADER_BYTES, dtype=np.uint8)

        def on_head() -> None:
            try:
                header = decode_header(head.tobytes())
            except BadGreeting as bad:
                on_bad(bad)
                return
            body = np.zeros(header.body_bytes, dtype=np.uint8)
            if header.body_bytes == 0:
                on_greeting(header.with_body(b""))
            else:
                self._stream(
                    "stream_recv", body, lambda: on_greeting(header.with_body(body.tobytes()))
                )

        self._stream("stream_recv", head, on_head)

    def _stream(
        self,
        operation: str,
        memory: np.ndarray[tuple[int], np.dtype[np.uint8]],
        on_done: Callable[[], None],
    ) -> None:
        """Sends or receives over UCX's stream API, which belongs to one endpoint: UCX matches tags
        per worker, and before there are keys two new clients look alike."""
        if self.endpoint is None:
            return
        try:
            request = getattr(self.endpoint, operation)(Array(memory))
        except UCX_ERRORS as error:
            # The endpoint's close callback ends the connection.
            logger.debug("%s with %s: %s", operation, self.peer, error)
            return

        def on_complete(error: Exception | None) -> None:
            if not self.closed and error is None:
                on_done()

        self.worker.track(request, memory, on_complete)

    def ends(self, *, listening: bool) -> Ends:
        """Both ends of the connection, as this side sees them. Owner thread."""
        info = query_endpoint(self.endpoint.handle)
        client, server = (info.remote, info.local) if listening else (info.local, info.remote)
        return Ends(client=_name(client), server=_name(server))

    def _start(self, sending: bytes, receiving: bytes) -> None:
        self._outgoing = WireTags(sending)
        self._incoming = WireTags(receiving)
        self._expect_news()

    @property
    def moving_bytes(self) -> int:
        return sum(transfer.nbytes for transfer in self._moving)

    def lanes(self) -> tuple[str, ...]:
        """Names of the UCX transports in use, empty when closed. Owner thread."""
        if self.endpoint is None:
            return ()
        return query_endpoint(self.endpoint.handle).transports

    def send_control(self, operation: int, payload: bytes) -> None:
        if self.endpoint is None or not self.greeted:
            return
        try:
            request, memory = self._send_news(operation, payload)
        except UCX_ERRORS as error:
            self._fail_with_ucx_error(error)
            return
        self.worker.track(request, memory, lambda error: None)

    def _send_news(self, operation: int, payload: bytes) -> tuple[Any, object]:
        """Starts to send news; returns the request and its memory."""
        assert self._outgoing is not None
        news = bytes([operation]) + payload
        wire = self._outgoing.of(NEWS_CHANNEL, self._news_sent)
        memory = np.frombuffer(news + self._outgoing.news_code(wire, news), dtype=np.uint8)
        self._news_sent += 1
        return self.endpoint.tag_send(Array(memory), libucxx.UCXXTag(wire)), memory

    def _expect_news(self) -> None:
        """Expects the next news, and takes those that are here already."""
        assert self._incoming is not None
        while not self._torn_down:
            self._news_wire = self._incoming.of(NEWS_CHANNEL, self._news_taken)
            self._news_taken += 1
            message = self._expect(self._news_wire, None)
            if message is None:
                return
            self._read_news(message)

    def _read_news(self, message: Any) -> None:
        self._pings.last_heard = time.monotonic()
        wire, length = message.sender_tag.value, message.length
        self._arrivals.forget(wire, may_come=False)
        if length not in _NEWS_BYTES:
            self._refuse(message, f"news of {length} bytes came")
            return
        body = np.zeros(length, dtype=np.uint8)
        request = self.worker.ucp.tag_recv_with_handle(Array(body), message)

        def on_complete(error: Exception | None) -> None:
            if error is not None or self._torn_down:
                return
            assert self._incoming is not None
            raw = body.tobytes()
            news, code = raw[:-NEWS_CODE_BYTES], raw[-NEWS_CODE_BYTES:]
            if same(code, self._incoming.news_code(wire, news)):
                self._take_control(news[0], news[1:])
            else:
                self._refuse(None, "news came that the peer has not sent")

        self.worker.track(request, body, on_complete)

    def _take_control(self, operation: int, payload: bytes) -> None:
        if operation == SKIP:
            self._take_skip(payload)
        else:
            super()._take_control(operation, payload)

    def _send_close_notice(self) -> None:
        """Sends the peer why, then tears down; at the latest after _CLOSE_NOTICE_SECONDS, since a
        peer that is stopped takes nothing."""
        if self._torn_down or not self.greeted:
            self._tear_down(None)
            return
        self.worker.call_at(time.monotonic() + _CLOSE_NOTICE_SECONDS, lambda: self._tear_down(None))
        try:
            request, memory = self._send_news(CLOSE_NOTICE, self._close_notice())
        except UCX_ERRORS:
            self._tear_down(None)
            return
        self.worker.track(request, memory, lambda error: self._tear_down(None))

    def _take_skip(self, payload: bytes) -> None:
        tag = int.from_bytes(payload, "big")
        if len(payload) == _SKIP_BYTES and not self._skip_offer(tag):
            self._skipped.add(tag)
            if len(self._skipped) > _MAX_SKIPPED:
                self.fail(
                    self._new_error(
                        TransportError,
                        f"{len(self._skipped)} messages were skipped that nobody has offered to "
                        "take",
                        hint="the peers disagree about the plan",
                    )
                )

    def _skip_offer(self, tag: int) -> bool:
        if not super()._skip_offer(tag):
            return False
        assert self._incoming is not None
        self._arrivals.forget(self._incoming.of(DATA_CHANNEL, tag), may_come=False)
        return True

    def _send_skip(self, tag: int) -> None:
        self.send_control(SKIP, tag.to_bytes(_SKIP_BYTES, "big"))

    def _accept_offer(self, transfer: PostedTransfer) -> None:
        """Expects the message, unless it is here already, or will not come."""
        if self._torn_down:
            return
        if transfer.channel == DATA_CHANNEL and transfer.tag in self._skipped:
            self._skipped.discard(transfer.tag)
            super()._skip_offer(transfer.tag)
            return
        assert self._incoming is not None
        wire = self._incoming.of(transfer.channel, transfer.tag)
        message = self._expect(wire, transfer)
        if message is not None:
            self._take_message(transfer, message)

    def _expect(self, wire: int, transfer: PostedTransfer | None) -> Any | None:
        """Expects a message; returns it if it is here already."""
        try:
            return self._arrivals.expect(wire, self, transfer)
        except MessageDropped:
            self.fail(
                self._new_error(
                    PeerLost,
                    "connection closed: a message came too long before its offer, and was dropped",
                    hint="the receiver is overloaded, or strangers reach its data port",
                )
            )
            return None

    def take(self, transfer: PostedTransfer | None, message: Any) -> None:
        """Takes a message that has come. Owner thread."""
        if transfer is None:
            self._read_news(message)
            self._expect_news()
        else:
            self._take_message(transfer, message)

    def _take_message(self, transfer: PostedTransfer, message: Any) -> None:
        self._pings.last_heard = time.monotonic()
        place = (transfer.channel, transfer.tag)
        with self._lock:
            mine = self._offers.get(place) is transfer
            if mine:
                del self._offers[place]
        if not mine:
            self._refuse(message, f"a second message came under tag {transfer.tag}")
            return
        wire = message.sender_tag.value
        if transfer.channel == DATA_CHANNEL:
            self._taken.append(wire)
        else:
            self._arrivals.forget(wire, may_come=False)
        if len(self._taken) > _MAX_TAKEN:
            self._arrivals.forget(self._taken.popleft(), may_come=False)
        self._start_receive(transfer, message)

    def _refuse(self, message: Any | None, why: str) -> None:
        """Fails the connection because somebody else sends on it; so a put of the peer's ends whose
        message was not taken."""
        self.fail(
            self._new_error(
                PeerLost,
                f"connection closed: {why}",
                hint="somebody else reads this network and sends to this port: encrypt it",
            )
        )
        if message is not None:
            # After the endpoint is closed, so that the bytes are not sent just to be thrown away.
            self.worker.discard(message)

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
        assert self._outgoing is not None
        array = as_ucxx_array(transfer.buffer.tensor)
        wire = self._outgoing.of(transfer.channel, transfer.tag)
        try:
            request = self.endpoint.tag_send(array, libucxx.UCXXTag(wire))
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
        if not isinstance(self.error, TransportClosed | PeerClosed | NetworkRestarted):
            self.worker.check_shared_memory()
        for transfer in offers:
            self._end(transfer, transfer.failure or self._later_error())
        self._forget_expected(offers)
        if self._moving:
            self.worker.call_at(time.monotonic() + _GIVE_UP_SECONDS, self._give_up)

    def _forget_expected(self, offers: list[PostedTransfer]) -> None:
        if self._incoming is None:
            return
        wires = [self._incoming.of(offer.channel, offer.tag) for offer in offers]
        if self._news_wire is not None:
            wires.append(self._news_wire)
        for wire in wires:
            self._arrivals.forget(wire, may_come=True)
        for wire in self._taken:
            self._arrivals.forget(wire, may_come=False)

    def _close_endpoint(self) -> None:
        endpoint, self.endpoint = self.endpoint, None
        endpoint.remove_close_callback()
        try:
            # Forced (error handling is on), so it returns at once, whatever the peer does.
            endpoint.close_blocking(0, 1)
        except UCX_ERRORS as error:
            logger.warning("closing the endpoint to %s: %s", self.peer, error)

    def _give_up(self) -> None:
        """Reports transfers that UCX never completed; their buffers stay out of the pool."""
        for transfer in list(self._moving):
            logger.error(
                "%s of tag %d with %s: UCX did not complete it %s s after the connection closed; "
                "its buffer of %d bytes is withheld until it does",
                transfer.kind,
                transfer.tag,
                self.peer,
                _GIVE_UP_SECONDS,
                transfer.nbytes,
            )
            self._end(transfer, transfer.failure or self._later_error(), release_buffer=False)


def _name(socket_address: tuple[str, int]) -> str:
    return str(Address(*socket_address)) if socket_address[0] else ""
