"""The common parts of all transports' connections: offers, deadlines, and failing as a whole.

A failure of any transfer fails the connection: with one message lost, the plan that both sides
follow is void.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

from data_plane.greeting import Greeting
from data_plane.owner_thread import OwnerThread
from data_plane.pings import PING_TAG, PONG_TAG, Pings
from data_plane.posted_transfer import DATA_CHANNEL, PostedTransfer, TransferKind
from data_plane.proof import ConnectionKeys, derived_key
from data_plane.transport import (
    MAX_TAG,
    MessageSizeMismatch,
    PeerClosed,
    PeerLost,
    TransferState,
    TransferTimeout,
    TransportClosed,
    TransportError,
)

if TYPE_CHECKING:
    from data_plane.buffer_pool import PooledBuffer
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

CLOSE_NOTICE: Final = 0
"""Operation of a control message: why the other side closes the connection."""

MAX_CLOSE_NOTICE_BYTES: Final = 1024
"""The longest reason for closing that is sent to a peer."""

Place = tuple[int, int]
"""(channel, tag): where an offer waits for its message."""


def nothing() -> None:
    pass


_LOCAL_IDS = itertools.count()


class BaseConnection:
    """Implements ``Connection`` but for moving bytes.

    Public methods are for any thread; those marked so are for the owner thread. A subclass accepts
    offers, sends puts and control messages, sends its close notice and lets go of the network.

    Args:
        worker: the transport's owner thread.
        peer: the peer's name.
        slowest_bytes_per_second: the slowest network worth using.
        metrics: counts every transfer when given.

    Attributes:
        local_id: the connection's number in this process, for the log.
        worker, peer: as above.
        error: why it is closed; TransportClosed after ``close()``, None while it is open.
        sending_key, receiving_key, leaves_host: see ``Connection``.
        on_control: receives (operation, payload) of probes; set by the transport.
    """

    transport_name: ClassVar[str]

    def __init__(
        self,
        worker: OwnerThread,
        peer: str,
        slowest_bytes_per_second: float,
        metrics: DataPlaneMetrics | None,
    ) -> None:
        self.local_id = next(_LOCAL_IDS)
        self.worker = worker
        self.peer = peer
        self._metrics = metrics
        self._lock = threading.Lock()
        self._offers: dict[Place, PostedTransfer] = {}
        self._moving: set[PostedTransfer] = set()
        self.error: TransportError | None = None
        self._torn_down = self._finished = False
        self.sending_key = self.receiving_key = b""
        self.leaves_host = True
        self.on_control: Callable[[int, bytes], None] | None = None
        self._closed_callbacks: list[Callable[[TransportError | None], None]] = []
        self._pings = Pings(self, slowest_bytes_per_second)

    @property
    def transport(self) -> str:
        return self.transport_name

    @property
    def closed(self) -> bool:
        return self.error is not None

    @property
    def greeted(self) -> bool:
        """Returns whether the handshake is over. Owner thread."""
        return bool(self.sending_key)

    def begin(self, keys: ConnectionKeys, *, listening: bool) -> None:
        """Ends the handshake, which gave these keys. Owner thread."""
        sending, receiving = keys.to_server, keys.to_client
        if listening:
            sending, receiving = receiving, sending
        self.leaves_host = keys.leaves_host
        self.sending_key = derived_key(sending, "checksums")
        self.receiving_key = derived_key(receiving, "checksums")
        self._start(sending, receiving)

    def send_greeting(self, greeting: Greeting, on_sent: Callable[[], None] = nothing) -> None:
        """Sends a word of the handshake; a failure to do so fails the connection. Owner thread."""
        raise NotImplementedError

    def receive_greeting(
        self, on_greeting: Callable[[Greeting], None], on_bad: Callable[[ValueError], None]
    ) -> None:
        """Receives the peer's next word and calls one of the two, or neither when the connection
        ends first. Owner thread."""
        raise NotImplementedError

    def lanes(self) -> tuple[str, ...]:
        """The network paths in use, if the library names them. Owner thread."""
        return ()

    def _start(self, sending: bytes, receiving: bytes) -> None:
        """Derives from the keys of both directions what shows whose a message is. Owner thread."""
        raise NotImplementedError

    @property
    def moving_bytes(self) -> int:
        """The bytes of messages that the network moves now, in either direction. Owner thread."""
        raise NotImplementedError

    def offer(
        self, tag: int, buffer: PooledBuffer, deadline_seconds: float, channel: int = DATA_CHANNEL
    ) -> PostedTransfer:
        """See ``Connection.offer``. On a closed connection the transfer has failed already."""
        place = (channel, tag)
        with self._lock:
            if place in self._offers:
                raise ValueError(f"tag {tag} is already on offer to {self.peer}; one at a time")
            transfer = self._new_transfer("offer", tag, buffer, deadline_seconds, channel)
            accepted = self.error is None
            if accepted:
                self._offers[place] = transfer
        if accepted:
            self.worker.submit(lambda: self._take_offer(transfer))
        else:
            self._fail_unstarted(transfer)
        return transfer

    def put(
        self,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
        channel: int = DATA_CHANNEL,
    ) -> PostedTransfer:
        """See ``Connection.put``. On a closed connection the transfer has failed already."""
        transfer = self._new_transfer("put", tag, buffer, deadline_seconds, channel)
        if self.error is not None:
            self._fail_put(transfer, ready)
        else:
            self.worker.submit(lambda: self._start_put(transfer, ready))
        return transfer

    def skip(self, tag: int) -> None:
        """See ``Connection.skip``."""
        _check_tag(tag)
        self.worker.submit(lambda: None if self.error else self._send_skip(tag))

    def close(self, reason: str = "closed by this side", *, finished: bool = False) -> None:
        error = self._new_error(TransportClosed, reason)
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            self._finished = finished
        self.worker.submit(self._send_close_notice)

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        with self._lock:
            if not self._torn_down:
                self._closed_callbacks.append(callback)
                return
        self._call_closed(callback)

    def show_as(self, name: str) -> None:
        if self._metrics is not None:
            self._metrics.name_peer(self.peer, self.transport_name, name)

    @property
    def last_heard(self) -> float:
        return self._pings.last_heard

    def ping(self, timeout_seconds: float) -> None:
        self._pings.ask(timeout_seconds)

    def lose_silent_peer(self, seconds: float) -> None:
        """Fails the connection after a ping that was not answered. Owner thread."""
        self.fail(
            self._new_error(
                PeerLost,
                f"no sign of life for {seconds:.1f} s, though it was asked for one",
                hint="the process is stopped, or the network to it is cut",
            )
        )

    def fail(self, error: TransportError) -> None:
        """Closes the connection because of ``error``. Owner thread."""
        with self._lock:
            if self.error is None:
                self.error = error
        self._tear_down(error)

    def send_control(self, operation: int, payload: bytes) -> None:
        """Sends a small message on the control channel, best effort. Owner thread."""
        raise NotImplementedError

    def _accept_offer(self, transfer: PostedTransfer) -> None:
        """A buffer is on offer. Owner thread."""
        raise NotImplementedError

    def _send(self, transfer: PostedTransfer) -> None:
        """Starts a put whose bytes are ready. Owner thread."""
        raise NotImplementedError

    def _send_skip(self, tag: int) -> None:
        """Informs the peer that no message with ``tag`` will come. Owner thread."""
        raise NotImplementedError

    def _send_close_notice(self) -> None:
        """Sends :meth:`_close_notice`, and tears down soon. Owner thread."""
        raise NotImplementedError

    def _close_notice(self) -> bytes:
        """The reason why this side closes the connection, for :meth:`_take_control` of the
        other one."""
        reason = self.error.reason if self.error else ""
        return bytes([self._finished]) + reason.encode()[: MAX_CLOSE_NOTICE_BYTES - 1]

    def _take_control(self, operation: int, payload: bytes) -> None:
        """Takes a control message of the peer. Owner thread."""
        if operation == CLOSE_NOTICE:
            said, finished = payload[1:].decode(errors="replace"), payload[:1] == b"\x01"
            self.fail(
                PeerClosed(said, transport=self.transport_name, peer=self.peer, finished=finished)
            )
        elif operation in (PING_TAG, PONG_TAG):
            self._pings.take(operation)
        elif self.on_control is not None:
            self.on_control(operation, payload)

    def _disconnect(self, offers: list[PostedTransfer]) -> None:
        """Lets go of the network, and ends every transfer: those of ``offers``, which nothing has
        come for, and those under way, some perhaps later. Owner thread; once."""
        raise NotImplementedError

    def _take_offer(self, transfer: PostedTransfer) -> None:
        if transfer.state is TransferState.PENDING:
            self._start_deadline(transfer)
            self._accept_offer(transfer)

    def _start_put(self, transfer: PostedTransfer, ready: Callable[[], bool] | None) -> None:
        if self.error is not None:
            self._fail_put(transfer, ready)
            return
        if ready is not None and not ready():
            if time.monotonic() > transfer.deadline:
                self._on_deadline(transfer)
                self._fail_put(transfer, ready)
            else:
                self.worker.call_when(
                    lambda: ready() or self._gives_up(transfer),
                    lambda: self._start_put(transfer, ready),
                )
            return
        if ready is not None:
            transfer.started = time.monotonic()
        self._send(transfer)
        if transfer.state is TransferState.PENDING:
            self._start_deadline(transfer)

    def _fail_put(self, transfer: PostedTransfer, ready: Callable[[], bool] | None) -> None:
        """Ends a put that was not sent. A kernel that writes its bytes until ``ready()`` may do so
        to the end: nobody else gets the memory before."""
        if ready is not None and not ready():
            buffer = transfer.buffer.retain()
            self.worker.submit(lambda: self.worker.call_when(ready, buffer.release))
        self._fail_unstarted(transfer)

    def _gives_up(self, transfer: PostedTransfer) -> bool:
        """Returns whether a put need not wait for its bytes any more."""
        return self.error is not None or time.monotonic() > transfer.deadline

    def _refuse_size(self, transfer: PostedTransfer, message_bytes: int) -> None:
        """The message for an offer has another length: fails the offer and the connection."""
        what = f"message with tag {transfer.tag} has {message_bytes} bytes, offered were "
        what += f"{transfer.nbytes}"
        hint = "the peers disagree about the plan"
        self._end(transfer, self._new_error(MessageSizeMismatch, what, hint=hint))
        self.fail(self._new_error(PeerLost, f"connection closed: {what}", hint=hint))

    def _end(
        self, transfer: PostedTransfer, error: TransportError | None, *, release_buffer: bool = True
    ) -> None:
        if transfer.state is TransferState.PENDING:
            seconds = time.monotonic() - transfer.started
            if transfer.kind == "offer" and error is None:
                self._pings.received(transfer.nbytes, seconds)
            if self._metrics is not None:
                self._metrics.transfer_ended(
                    kind=transfer.kind,
                    peer=self.peer,
                    transport=self.transport_name,
                    nbytes=transfer.nbytes,
                    seconds=seconds,
                    error=error,
                )
        transfer.finish(error, release_buffer=release_buffer)

    def _start_deadline(self, transfer: PostedTransfer) -> None:
        transfer.timer = self.worker.call_at(transfer.deadline, lambda: self._on_deadline(transfer))

    def _on_deadline(self, transfer: PostedTransfer) -> None:
        if transfer.state is not TransferState.PENDING:
            return
        what = (
            f"{transfer.kind} of tag {transfer.tag} ({transfer.nbytes} bytes) not done within "
            f"{transfer.deadline_seconds} s"
        )
        hint = "the peer is stopped, cut off or too slow"
        transfer.failure = self._new_error(TransferTimeout, what, hint=hint)
        self.fail(self._new_error(PeerLost, f"connection closed: {what}", hint=hint))

    def _tear_down(self, error: TransportError | None) -> None:
        """Ends every transfer, and calls the closed callbacks. Owner thread; once."""
        with self._lock:
            if self._torn_down:
                return
            self._torn_down = True
            offers, self._offers = list(self._offers.values()), {}
            closed_callbacks, self._closed_callbacks = self._closed_callbacks, []
        self._disconnect(offers)
        logger.info("connection %d with %s closed: %s", self.local_id, self.peer, self.error)
        for callback in closed_callbacks:
            self._call_closed(callback)

    def _fail_unstarted(self, transfer: PostedTransfer) -> None:
        self._end(transfer, self._later_error())

    def _later_error(self) -> TransportError:
        """The error of a transfer that did not itself make the connection fail."""
        assert self.error is not None
        if isinstance(self.error, TransportClosed | PeerLost):
            return self.error
        return self._new_error(PeerLost, f"connection failed: {self.error}")

    def _new_error(
        self, error_class: type[TransportError], message: str, *, hint: str = ""
    ) -> TransportError:
        return error_class(message, transport=self.transport_name, peer=self.peer, hint=hint)

    def _new_transfer(
        self,
        kind: TransferKind,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        channel: int,
    ) -> PostedTransfer:
        _check_tag(tag)
        if not deadline_seconds > 0:
            raise ValueError(f"deadline_seconds is {deadline_seconds}; give more than 0")
        return PostedTransfer(
            kind=kind,
            tag=tag,
            buffer=buffer,
            deadline_seconds=deadline_seconds,
            transport=self.transport_name,
            peer=self.peer,
            owner_thread_id=self.worker.thread_id,
            channel=channel,
        )

    def _skip_offer(self, tag: int) -> bool:
        """Ends the offer of ``tag`` without a message, if there is one. Owner thread."""
        with self._lock:
            transfer = self._offers.pop((DATA_CHANNEL, tag), None)
        if transfer is not None:
            transfer.finish(None, skipped=True)
        return transfer is not None

    def _call_closed(self, callback: Callable[[TransportError | None], None]) -> None:
        try:
            callback(None if isinstance(self.error, TransportClosed) else self.error)
        except Exception:
            logger.exception("closed callback of the connection with %s failed", self.peer)


def _check_tag(tag: int) -> None:
    if not 0 <= tag <= MAX_TAG:
        raise ValueError(f"tag is {tag}; valid: 0 to {MAX_TAG}")
