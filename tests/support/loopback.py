"""A transport inside one process, without any network: what is put is there at once.

It keeps the contract of :mod:`data_plane.transport`: a message is matched with the buffer that was
offered for its tag, in either order; one of another size fails the connection and its bytes are
not used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from data_plane.buffer_pool import PooledBuffer
from data_plane.transport import (
    AcceptCallback,
    Address,
    ClaimRefused,
    ConnectFailed,
    HandshakeRejected,
    MessageSizeMismatch,
    PeerLost,
    ProbeResult,
    ProofFailed,
    Transfer,
    TransferState,
    TransferTimeout,
    TransportClosed,
    TransportError,
)

NAME = "loopback"


class LoopbackTransfer:
    """One offer or put; ``buffer`` is held until it ends."""

    def __init__(self, tag: int, buffer: PooledBuffer) -> None:
        self.tag, self.nbytes = tag, buffer.nbytes
        self.state = TransferState.PENDING
        self.error: TransportError | None = None
        self.ended_at: float | None = None
        self.moving_seconds = 0.0
        self.buffer = buffer.retain()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[Transfer], None]] = []
        self._lock = threading.Lock()

    def wait(self, timeout_seconds: float) -> None:
        if not self._ended.wait(timeout_seconds):
            raise TransferTimeout("nothing came", transport=NAME, peer="")
        if self.error is not None:
            raise self.error

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        with self._lock:
            if self.state is TransferState.PENDING:
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, error: TransportError | None = None, *, skipped: bool = False) -> None:
        """Done or skipped, or failed with ``error``."""
        with self._lock:
            if self.state is not TransferState.PENDING:
                return
            self.error, self.ended_at = error, time.monotonic()
            ended = TransferState.SKIPPED if skipped else TransferState.DONE
            self.state = TransferState.FAILED if error else ended
            callbacks = self._callbacks
        self._ended.set()
        for callback in callbacks:
            callback(self)
        self.buffer.release()


class LoopbackConnection:
    """One end; ``other`` is the peer's."""

    transport = NAME
    sending_key = receiving_key = bytes(32)
    leaves_host = False

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.other: LoopbackConnection
        self.closed = False
        self._error: TransportError | None = None
        self.last_heard = time.monotonic()
        self.offers: dict[int, LoopbackTransfer] = {}
        self._unclaimed: dict[int, torch.Tensor] = {}
        self._skipped: set[int] = set()
        self._callbacks: list[Callable[[TransportError | None], None]] = []
        self._lock = threading.RLock()

    def show_as(self, name: str) -> None:
        """There are no metrics."""

    def offer(self, tag: int, buffer: PooledBuffer, deadline_seconds: float) -> Transfer:
        with self._lock:
            if tag in self.offers:
                raise ValueError(f"tag {tag} is already on offer to {self.peer}; one at a time")
            transfer = LoopbackTransfer(tag, buffer)
            if self.closed:
                transfer.end(TransportClosed("closed", transport=NAME, peer=self.peer))
                return transfer
            self.offers[tag] = transfer
            waiting = self._unclaimed.pop(tag, None)
            skipped = tag in self._skipped
        if skipped:
            self.arrive_skip(tag)
        elif waiting is not None:
            self.arrive(tag, waiting)
        return transfer

    def put(
        self,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> Transfer:
        transfer = LoopbackTransfer(tag, buffer)
        if self.closed:
            transfer.end(TransportClosed("closed", transport=NAME, peer=self.peer))
            return transfer
        message = buffer.tensor.clone()
        transfer.end()
        self.other.arrive(tag, message)
        return transfer

    def arrive(self, tag: int, message: torch.Tensor) -> None:
        """A message of the peer is here."""
        with self._lock:
            if self.closed:
                return
            offer = self.offers.pop(tag, None)
            if offer is None:
                self._unclaimed[tag] = message
                return
        if message.numel() != offer.nbytes:
            what = f"{message.numel()} bytes came, {offer.nbytes} were offered"
            error = MessageSizeMismatch(what, transport=NAME, peer=self.peer)
            offer.end(error)
            self.lose(error)
            self.other.lose(PeerLost("it closed the connection", transport=NAME, peer=self.peer))
            return
        offer.buffer.tensor.copy_(message)
        offer.end()

    def skip(self, tag: int) -> None:
        if not self.closed:
            self.other.arrive_skip(tag)

    def arrive_skip(self, tag: int) -> None:
        """The peer says that no message with ``tag`` will come."""
        with self._lock:
            offer = self.offers.pop(tag, None)
            if offer is None:
                self._skipped.add(tag)
                return
            self._skipped.discard(tag)
        offer.end(skipped=True)

    def close(self, reason: str = "closed by this side", *, finished: bool = False) -> None:
        self.lose(None)
        self.other.lose(PeerLost(reason, transport=NAME, peer=self.peer))

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        with self._lock:
            if not self.closed:
                self._callbacks.append(callback)
                return
        callback(self._error)

    def ping(self, timeout_seconds: float) -> None:
        self.last_heard = time.monotonic()

    def lose(self, error: TransportError | None) -> None:
        """It ends here, by an error or by this side's close."""
        with self._lock:
            if self.closed:
                return
            self.closed, self._error = True, error
            offers, self.offers = self.offers, {}
            self._unclaimed.clear()
            callbacks = self._callbacks
        for offer in offers.values():
            offer.end(error or TransportClosed("closed", transport=NAME, peer=self.peer))
        for callback in callbacks:
            callback(error)


@dataclass(frozen=True)
class LoopbackClaim:
    """Of a client that knows ``secret``."""

    hello: bytes
    secret: bytes

    def check(self, secret: bytes) -> None:
        if secret != self.secret:
            raise ProofFailed("the proof of the hello is wrong")


class LoopbackTransport:
    """Listens on names; connects to whatever listens in the same process."""

    name = NAME
    _listeners: dict[str, AcceptCallback]

    def __init__(self) -> None:
        self._listeners = {}

    def listen(self, host: str, port: int, accept: AcceptCallback) -> Address:
        address = Address(host, port or len(self._listeners) + 1)
        self._listeners[str(address)] = accept
        return address

    def connect(
        self, address: Address, hello: bytes, timeout_seconds: float, *, secret: bytes
    ) -> tuple[LoopbackConnection, bytes]:
        accept = self._listeners.get(str(address))
        if accept is None:
            raise ConnectFailed("nobody listens", transport=NAME, peer=str(address))
        near, far = LoopbackConnection(str(address)), LoopbackConnection("client")
        near.other, far.other = far, near
        try:
            return near, accept(LoopbackClaim(hello, secret), far)
        except ValueError as error:
            near.closed = far.closed = True
            code = error.code if isinstance(error, ClaimRefused) else 0
            raise HandshakeRejected(
                str(error), transport=NAME, peer=str(address), code=code
            ) from error

    def probe(
        self, connection: LoopbackConnection, nbytes: int, repeats: int, timeout_seconds: float
    ) -> ProbeResult:
        return ProbeResult(connection.peer, NAME, NAME, nbytes, 1.0, 1e-6)

    def close(self, timeout_seconds: float = 5.0) -> None:
        self._listeners.clear()
