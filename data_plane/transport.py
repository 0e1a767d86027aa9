"""The transport interface: what a tick needs from a network, and nothing more.

The receiver *offers* a buffer for a tag, the sender *puts* a buffer under that tag, and both see
the transfer end, either done or failed. Nothing of a process can be read or written by a peer
outside an offer. The shape maps to two-sided libraries (ucxx: tagged receive and send) and to
one-sided ones (nixl: an advertised region and a WRITE with a notification).

A connection belongs to one pair (client, server) of one job, so a tag only has to be unique within
its connection. A tag is to be used once in each direction of a connection: what nobody can foretell
the first time, the network's watchers know the second time.

A connection begins with a proof. The client shows that it knows a secret, and so does the
listener, without sending it; from then on a message belongs to its connection by a key that both
have derived.

Every transport passes ``tests/service/data_plane/conformance.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from data_plane.buffer_pool import PooledBuffer

MAX_TAG = 2**63 - 1
MAX_HELLO_BYTES = 64 * 1024


class TransportName(StrEnum):
    """The library that moves the bytes, and its back end where it has several; the same in all
    processes of a job. ``auto`` stands for ucxx or nixl, as
    ``data_plane.transports.resolve_transport`` chooses."""

    AUTO = "auto"
    UCXX = "ucxx"
    NIXL = "nixl"
    LIBFABRIC = "nixl:libfabric"


def check_transport(name: str) -> TransportName:
    """Returns the transport called ``name``.

    Raises:
        ValueError: there is none.
    """
    try:
        return TransportName(name)
    except ValueError:
        valid = ", ".join(repr(str(each)) for each in TransportName)
        raise ValueError(f"transport is {name!r}; valid: {valid}") from None


class TransferState(StrEnum):
    """A transfer is pending, then exactly one of done, skipped (an offer only) and failed."""

    PENDING = "pending"
    DONE = "done"
    SKIPPED = "skipped"
    FAILED = "failed"


@dataclass(frozen=True)
class Address:
    """The place where a transport listens: a host name or IP address, and a TCP port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class TransportError(Exception):
    """A transfer or connection failed; names the transport, the peer, and what to do.

    Args:
        message: what happened, in words.
        transport: name of the transport, for example ``"ucxx"``.
        peer: the peer as the caller knows it (address, or the name given in the handshake).
        hint: what the reader can do about it.
    """

    def __init__(self, message: str, *, transport: str, peer: str, hint: str = "") -> None:
        self.reason = message
        self.transport = transport
        self.peer = peer
        self.hint = hint
        super().__init__(f"{transport} peer {peer}: {message}" + (f" ({hint})" if hint else ""))


class PeerLost(TransportError):
    """The peer died, or the connection to it broke."""


class PeerClosed(PeerLost):
    """The peer closed the connection.

    Attributes:
        said: the reason that it gave.
        finished: whether it had no more to do; otherwise something has gone wrong there.
    """

    def __init__(
        self, said: str, *, transport: str, peer: str, hint: str = "", finished: bool = False
    ) -> None:
        self.said = said
        self.finished = finished
        super().__init__(f"closed by the peer: {said}", transport=transport, peer=peer, hint=hint)


class PeerReset(PeerLost):
    """The connection was reset from the peer's side: its process is gone, or has let go of it
    without a word. A network that is cut resets nothing."""


class NetworkRestarted(PeerLost):
    """This side had to restart its network library. The peer is not to blame, and can be reached
    again at once."""


class TransferTimeout(TransportError):
    """A deadline passed: the peer is stopped, cut off or too slow. The connection is closed."""


class ConnectFailed(TransportError):
    """No connection: nobody listens there, the name does not resolve, or the deadline passed."""


class HandshakeRejected(TransportError):
    """The listening side refused the hello; the message carries its reason.

    Attributes:
        proven: whether the listener has shown that it knows the secret. If not, anybody may have
            said so: try again, and decide nothing because of it that cannot be undone.
        code: of its :class:`ClaimRefused`; 0 if it gave none.
    """

    def __init__(
        self,
        message: str,
        *,
        transport: str,
        peer: str,
        hint: str = "",
        proven: bool = False,
        code: int = 0,
    ) -> None:
        self.proven = proven
        self.code = code
        super().__init__(message, transport=transport, peer=peer, hint=hint)


class ClaimRefused(ValueError):
    """The error of an accept callback that refuses a client; the message goes to it.

    Attributes:
        code: why, in a number of the application's from 1 to 255; 0 for none.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class ProofFailed(ValueError):
    """A client does not know the secret that its hello stands for."""


class AddressesDiffer(ValueError):
    """A client that knows the secret sees other addresses than the listener does."""


class MessageSizeMismatch(TransportError):
    """A message arrived whose length is not the offered one; its bytes must not be used."""


class TransportClosed(TransportError):
    """The connection or transport was closed on this side."""


class Transfer(Protocol):
    """One offer or one put. Its buffer must not be touched before ``state`` leaves PENDING."""

    @property
    def tag(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def state(self) -> TransferState: ...

    @property
    def error(self) -> TransportError | None:
        """The reason why it failed; None unless ``state`` is FAILED."""

    @property
    def ended_at(self) -> float | None:
        """``time.monotonic()`` when it was done or failed; None before."""

    @property
    def moving_seconds(self) -> float:
        """How long its bytes took, once it has ended: a put since it was asked for and its bytes
        were written, an offer since its message arrived. 0 before."""

    def wait(self, timeout_seconds: float) -> None:
        """Blocks until the transfer is done or skipped.

        Raises:
            TransportError: it failed, or ``timeout_seconds`` passed while it goes on.
        """

    def add_done_callback(self, callback: Callable[[Transfer], None]) -> None:
        """Calls ``callback(self)`` once it is no longer pending, on the transport's own thread (or
        at once, on the calling thread, if it already is). The callback must not block or raise."""


class Connection(Protocol):
    """A two-way connection with one peer. All methods are thread-safe and never block."""

    @property
    def peer(self) -> str:
        """The peer's name in errors, logs and metric labels."""

    @property
    def transport(self) -> str:
        """The transport's name, for example ``"ucxx"``."""

    @property
    def closed(self) -> bool: ...

    @property
    def sending_key(self) -> bytes:
        """32 bytes for checksums of the messages that this side sends. The peer has them as its
        ``receiving_key``, and nobody else has them."""

    @property
    def receiving_key(self) -> bytes:
        """32 bytes for checksums of the messages that the peer sends."""

    @property
    def leaves_host(self) -> bool:
        """Returns whether its messages leave this host, or may; the peer finds the same. Good once
        the handshake is over."""

    def offer(self, tag: int, buffer: PooledBuffer, deadline_seconds: float) -> Transfer:
        """Posts ``buffer.tensor`` (1-D uint8, contiguous) to receive the message with ``tag``.

        The message must be exactly ``buffer.nbytes`` long (MessageSizeMismatch otherwise). The
        transfer keeps a reference to the buffer until the network can no longer touch it, also
        after a failure, so the caller may release its own at any time.

        Args:
            deadline_seconds: from now; when it passes, the connection fails with
                TransferTimeout and every other transfer of it with PeerLost.
        """

    def put(
        self,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> Transfer:
        """Sends ``buffer.tensor`` under ``tag``. Done means that the buffer may be reused, not
        that the peer has the message. A tag is put once on a connection: where the network cannot
        say whose a message is, a second one under it fails the connection at once.

        Args:
            deadline_seconds: as in :meth:`offer`.
            ready: the bytes leave once this is True; a CUDA event's ``query`` for a buffer that a
                kernel still writes, since no network knows of streams. Called on the transport's
                thread.
        """

    def skip(self, tag: int) -> None:
        """Says that no message with ``tag`` will be put: the peer's offer for it, be it there or
        still to come, ends as SKIPPED, its buffer as it was. On a closed connection nothing
        happens.
        """

    def close(self, reason: str = "closed by this side", *, finished: bool = False) -> None:
        """Closes the connection; pending transfers fail with TransportClosed. Idempotent. The
        peer's transfers fail with PeerClosed, which carries both arguments, if the peer could be
        informed, else with PeerLost.

        Args:
            reason: why, in words.
            finished: this side has no more to do, and nothing has gone wrong.
        """

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        """Calls ``callback(error)`` once when the connection ends (None after ``close()``)."""

    def show_as(self, name: str) -> None:
        """Shows the peer under ``name``, a server id or a job's rank, in metrics of the process."""

    @property
    def last_heard(self) -> float:
        """``time.monotonic()`` when something of the peer last arrived, at first when it was
        opened."""

    def ping(self, timeout_seconds: float) -> None:
        """Asks the peer for a sign of life, and fails the connection with PeerLost if none comes.

        The peer's transport answers on its own thread, so a peer that computes, or waits for
        somebody else, answers at once; one that is stopped, or cut off in either direction, does
        not. Any message that arrives in the meantime is as good as the answer. A ping while
        another one is under way does nothing.

        Args:
            timeout_seconds: how long to wait for it. Where messages travel in order, a transport
                adds the time that those under way take on the slowest network worth using.
        """


@dataclass(frozen=True)
class ProbeResult:
    """The result of a bandwidth probe.

    Attributes:
        peer: the peer's name.
        transport: the transport's name.
        lanes: the network path it chose, for example ``"tcp"``, ``"posix"``, ``"cuda_ipc"``
            (comma-separated; empty when the library does not say).
        nbytes: bytes of one probe message.
        gigabytes_per_second: 1e9 bytes per second, one way.
        round_trip_seconds: of the smallest message.
    """

    peer: str
    transport: str
    lanes: str
    nbytes: int
    gigabytes_per_second: float
    round_trip_seconds: float


class Claim(Protocol):
    """A client's hello, which is only said until it is checked."""

    @property
    def hello(self) -> bytes: ...

    def check(self, secret: bytes) -> None:
        """Returns if the client knows ``secret``.

        Raises:
            ProofFailed: it does not.
            AddressesDiffer: it does, but address translation, or somebody, is in between.
        """


AcceptCallback = Callable[[Claim, Connection], bytes]
"""Called on the transport's thread with a client's claim and its connection, must not block, checks
the claim, and returns the answer for the client. Raises ValueError to refuse it, ClaimRefused with
a code: a reason that it gives before the claim is checked may be read by anybody."""


class Transport(Protocol):
    """One network library, with one owner thread that drives it."""

    @property
    def name(self) -> str: ...

    @property
    def stalled_seconds(self) -> float:
        """How long the owner thread has been held up in one turn; 0 if it is not."""

    def listen(self, host: str, port: int, accept: AcceptCallback) -> Address:
        """Listens on ``host:port`` (port 0: any free one) and returns the address to connect to.

        Raises:
            TransportError: the port is in use, or the host is not of this machine.
        """

    def connect(
        self, address: Address, hello: bytes, timeout_seconds: float, *, secret: bytes
    ) -> tuple[Connection, bytes]:
        """Connects, sends ``hello`` and returns the connection and the listener's answer.

        Args:
            secret: what this side and the listener know, and nobody else; it is not sent.

        Raises:
            ConnectFailed, HandshakeRejected: nobody answers, or the listener refuses.
        """

    def probe(
        self, connection: Connection, nbytes: int, repeats: int, timeout_seconds: float
    ) -> ProbeResult:
        """Measures the bandwidth to the peer of ``connection`` (one made by ``connect``), which
        answers by itself on its transport's thread. Blocks at most ``timeout_seconds``.

        Raises:
            TransportError: the probe failed or the deadline passed.
        """

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Closes listener and connections, waits for the owner thread. Idempotent."""
