"""The bandwidth probe of every transport: the asking side, and the responder on the owner thread.

A probe's messages travel on the connection's control channel, numbered through all probes of the
connection, so they share no tag with the tick's messages or with one another.
"""

from __future__ import annotations

import logging
import queue
import statistics
import struct
import threading
import time
from collections import deque
from enum import IntEnum
from typing import Final

from data_plane.base_connection import BaseConnection
from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.owner_thread import Timer
from data_plane.posted_transfer import CONTROL_CHANNEL
from data_plane.transport import (
    ProbeResult,
    Transfer,
    TransferState,
    TransferTimeout,
    TransportError,
)

logger = logging.getLogger(__name__)

_REQUEST = struct.Struct("!QIQ")
_MAX_REPEATS = 100_000
_PINGS = 16
_WINDOW = 2
RESPONDER_TIMEOUT_SECONDS: Final = 60.0
_OFFERS: Final = 4
"""On offer at a time: more than are under way."""


class Operation(IntEnum):
    """The kinds of a probe's control messages."""

    PING = 1
    PONG = 2
    REQUEST = 3
    ACCEPT = 4
    REFUSE = 5
    DONE = 7


class ProbeEndpoint:
    """Both sides of the probe of one connection.

    Args:
        connection: whose probe this is; takes over its control channel.
        pool: where probe messages live, in the kind of memory that is to be measured.
        max_probe_bytes: a larger request of the peer is refused.
    """

    def __init__(self, connection: BaseConnection, pool: BufferPool, max_probe_bytes: int) -> None:
        self._connection = connection
        self._pool = pool
        self._max_probe_bytes = max_probe_bytes
        self._replies: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._asking = threading.Lock()
        self._expecting_replies = False
        self._receive_buffer: PooledBuffer | None = None
        self._sent = 0
        self._next_tag = self._end_tag = 0
        self._remaining = 0
        self._abandon_timer: Timer | None = None
        connection.on_control = self.take
        connection.add_closed_callback(self._on_closed)

    def ask(self, nbytes: int, repeats: int, timeout_seconds: float) -> ProbeResult:
        """See ``Transport.probe``. Any thread but the owner's; one probe at a time."""
        if nbytes <= 0 or not 0 < repeats <= _MAX_REPEATS:
            raise ValueError(
                f"nbytes is {nbytes}, repeats is {repeats}; give nbytes > 0 and repeats from 1 "
                f"to {_MAX_REPEATS}"
            )
        deadline = time.monotonic() + timeout_seconds
        if not self._asking.acquire(timeout=timeout_seconds):
            raise self._timeout("waiting for another probe of this connection")
        try:
            while not self._replies.empty():
                self._replies.get_nowait()
            self._expecting_replies = True
            return self._measure(nbytes, repeats, deadline)
        finally:
            self._expecting_replies = False
            self._asking.release()

    def _measure(self, nbytes: int, repeats: int, deadline: float) -> ProbeResult:
        round_trips = [self._ping(deadline) for _ in range(_PINGS)]
        self._send_control(Operation.REQUEST, _REQUEST.pack(nbytes, repeats, self._sent))
        operation, body = self._next_reply(deadline)
        if operation != Operation.ACCEPT:
            raise TransportError(
                f"probe of {nbytes} bytes refused: {body.decode(errors='replace')}",
                transport=self._connection.transport_name,
                peer=self._connection.peer,
                hint="ask for a smaller probe",
            )
        seconds = self._send_data(nbytes, repeats, deadline)
        return ProbeResult(
            peer=self._connection.peer,
            transport=self._connection.transport_name,
            lanes=",".join(self._lanes(deadline)),
            nbytes=nbytes,
            gigabytes_per_second=nbytes * repeats / seconds / 1e9,
            round_trip_seconds=statistics.median(round_trips),
        )

    def _ping(self, deadline: float) -> float:
        start = time.perf_counter()
        self._send_control(Operation.PING, b"ping")
        self._next_reply(deadline)
        return time.perf_counter() - start

    def _send_data(self, nbytes: int, repeats: int, deadline: float) -> float:
        """Sends ``repeats`` messages, a few at a time; returns seconds until all are there."""
        buffer = self._pool.acquire(nbytes)
        try:
            pending: deque[Transfer] = deque()
            start = time.perf_counter()
            for _ in range(repeats):
                if len(pending) == _WINDOW:
                    pending.popleft().wait(self._seconds_left(deadline))
                pending.append(
                    self._connection.put(
                        self._sent,
                        buffer,
                        self._seconds_left(deadline),
                        channel=CONTROL_CHANNEL,
                    )
                )
                self._sent += 1
            for transfer in pending:
                transfer.wait(self._seconds_left(deadline))
            self._next_reply(deadline)
            return time.perf_counter() - start
        finally:
            buffer.release()

    def _lanes(self, deadline: float) -> tuple[str, ...]:
        """The network paths in use, if the library names them."""
        connection = self._connection
        answer: queue.SimpleQueue[tuple[str, ...]] = queue.SimpleQueue()
        connection.worker.submit(lambda: answer.put(connection.lanes()))
        try:
            return answer.get(timeout=self._seconds_left(deadline))
        except queue.Empty:
            raise self._timeout("asking for its lanes") from None

    def _send_control(self, operation: Operation, payload: bytes) -> None:
        connection = self._connection
        connection.worker.submit(lambda: connection.send_control(operation, payload))

    def _next_reply(self, deadline: float) -> tuple[int, bytes]:
        if self._connection.closed:
            raise self._lost()
        try:
            reply = self._replies.get(timeout=self._seconds_left(deadline))
        except queue.Empty:
            raise self._timeout("waiting for the peer's answer to a probe") from None
        if reply is None:
            raise self._lost()
        return reply

    def _seconds_left(self, deadline: float) -> float:
        left = deadline - time.monotonic()
        if left <= 0:
            raise self._timeout("probing")
        return left

    def _timeout(self, what: str) -> TransferTimeout:
        return TransferTimeout(
            f"deadline passed while {what}",
            transport=self._connection.transport_name,
            peer=self._connection.peer,
            hint="the peer is stopped, cut off or too slow",
        )

    def _lost(self) -> TransportError:
        assert self._connection.error is not None
        return self._connection.error

    def _on_closed(self, error: TransportError | None) -> None:
        self._replies.put(None)
        self._drop_receive_buffer()

    def take(self, operation: int, body: bytes) -> None:
        """Takes a control message. Owner thread."""
        if operation == Operation.PING:
            self._connection.send_control(Operation.PONG, body)
        elif operation == Operation.REQUEST:
            self._answer_request(body)
        elif self._expecting_replies:
            self._replies.put((operation, body))

    def _answer_request(self, body: bytes) -> None:
        reason = self._prepare(body)
        if reason:
            self._connection.send_control(Operation.REFUSE, reason.encode())
        else:
            self._connection.send_control(Operation.ACCEPT, b"ok")

    def _prepare(self, body: bytes) -> str:
        """Readies the buffer that a request asks for; returns why not, or an empty string."""
        if len(body) != _REQUEST.size:
            return f"a request has {_REQUEST.size} bytes, not {len(body)}"
        nbytes, repeats, first_tag = _REQUEST.unpack(body)
        if not 0 < nbytes <= self._max_probe_bytes:
            return f"{nbytes} bytes asked for, max_probe_bytes={self._max_probe_bytes}"
        if first_tag < self._end_tag or repeats > _MAX_REPEATS or first_tag > 2**32:
            return f"{repeats} messages from number {first_tag} on"
        self._drop_receive_buffer()
        try:
            self._receive_buffer = self._pool.acquire(nbytes)
        except Exception as error:
            logger.warning("no memory for the probe of %s: %s", self._connection.peer, error)
            return "no memory for a probe of this size"
        self._remaining = repeats
        self._abandon_timer = self._connection.worker.call_at(
            time.monotonic() + RESPONDER_TIMEOUT_SECONDS, self._drop_receive_buffer
        )
        self._next_tag, self._end_tag = first_tag, first_tag + repeats
        for _ in range(min(repeats, _OFFERS)):
            self._offer_next(self._receive_buffer)
        return ""

    def _offer_next(self, buffer: PooledBuffer) -> None:
        tag, self._next_tag = self._next_tag, self._next_tag + 1
        transfer = self._connection.offer(
            tag, buffer, RESPONDER_TIMEOUT_SECONDS, channel=CONTROL_CHANNEL
        )
        transfer.add_done_callback(lambda ended: self._on_ended(ended, buffer))

    def _on_ended(self, transfer: Transfer, buffer: PooledBuffer) -> None:
        done = transfer.state is TransferState.DONE
        # Before the last one gives the buffer back.
        if done and self._next_tag < self._end_tag:
            self._offer_next(buffer)
        self._received(done=done)

    def _received(self, *, done: bool) -> None:
        """One message of the probe has come, or will not. Owner thread."""
        self._remaining -= 1
        if done and self._remaining == 0:
            self._connection.send_control(Operation.DONE, b"done")
            self._drop_receive_buffer()

    def _drop_receive_buffer(self) -> None:
        buffer, self._receive_buffer = self._receive_buffer, None
        if buffer is not None:
            buffer.release()
        if self._abandon_timer is not None:
            self._abandon_timer.cancel()
