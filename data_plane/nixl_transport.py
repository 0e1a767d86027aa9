"""The nixl transport: listening, connecting and closing.

nixl carries RDMA (InfiniBand, RoCE, EFA) in its wheel, and writes straight into the offered buffer.
IPv4 only, as the ucxx transport.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import select
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from data_plane.addresses import connect_failed, local_ip, resolve
from data_plane.buffer_pool import BufferPool, device_allocator
from data_plane.greeting import (
    HEADER_BYTES,
    BadGreeting,
    Greeting,
    Status,
    decode_header,
    judge,
)
from data_plane.nixl_connection import TRANSPORT_NAME, NixlConnection
from data_plane.nixl_link import receive_exactly
from data_plane.nixl_probe import NixlProbe
from data_plane.nixl_settings import NixlSettings
from data_plane.nixl_worker import NixlWorker
from data_plane.owner_result import OwnerResult
from data_plane.transport import (
    MAX_HELLO_BYTES,
    AcceptCallback,
    Address,
    Connection,
    HandshakeRejected,
    ProbeResult,
    TransportClosed,
    TransportError,
)

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

_COMMAND_TIMEOUT_SECONDS = 5.0
_BACKLOG: Final = 1024
_REJECTION_LINGER_SECONDS = 1.0
"""How long a refused client has to read the reason."""

_LINGER_SECONDS = 1.0
"""How long a closing transport waits for writes that cannot be stopped."""


class NixlTransport:
    """Implements ``Transport`` with nixl. Starts its owner thread at once; ``close`` ends it.

    Args:
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.

    Raises:
        ImportError: nixl is not installed; says what to install.
        RuntimeError: nixl did not start.
    """

    def __init__(
        self, settings: NixlSettings | None = None, metrics: DataPlaneMetrics | None = None
    ) -> None:
        self._settings = settings or NixlSettings()
        self._metrics = metrics
        self._settings.warn_about_environment()
        self._probe_pool = BufferPool(device_allocator(self._settings.device))
        self._connections: dict[int, NixlConnection] = {}
        self._probes: dict[int, NixlProbe] = {}
        self._ids = itertools.count()
        self._listener: socket.socket | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        self._worker = NixlWorker(self._settings)
        self._worker.start()
        # Ends the owner thread before the interpreter takes its modules apart.
        atexit.register(self.close, 1.0)

    @property
    def name(self) -> str:
        return TRANSPORT_NAME

    def listen(self, host: str, port: int, accept: AcceptCallback) -> Address:
        """See ``Transport.listen``; once per transport.

        Raises:
            TransportError: port in use, ``host`` is not of this machine, or called twice.
        """
        self._require_open(f"{host}:{port}")
        ip = local_ip(host, port, TRANSPORT_NAME)
        if self._listener is not None:
            raise self._cannot_listen(host, port, "this transport listens already")
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ip, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(host, port, str(error)) from error
        listener.setblocking(False)
        self._listener = listener
        self._worker.submit(
            lambda: self._worker.watch(
                listener, select.EPOLLIN, lambda events: self._take_in(listener, accept)
            )
        )
        bound_port = int(listener.getsockname()[1])
        logger.info("listening on %s:%d", host, bound_port)
        return Address(host, bound_port)

    def connect(
        self, address: Address, hello: bytes, timeout_seconds: float
    ) -> tuple[Connection, bytes]:
        """See ``Transport.connect``."""
        if len(hello) > MAX_HELLO_BYTES:
            raise ValueError(f"hello has {len(hello)} bytes, MAX_HELLO_BYTES={MAX_HELLO_BYTES}")
        self._require_open(str(address))
        deadline = time.monotonic() + timeout_seconds
        ip = resolve(address, timeout_seconds, TRANSPORT_NAME)
        local_id = next(self._ids)
        link, answer = self._greet(address, ip, hello, local_id, deadline)
        result = OwnerResult()
        self._worker.submit(lambda: self._adopt(link, local_id, str(address), result))
        try:
            connection: NixlConnection = result.get(_COMMAND_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise connect_failed(address, str(error), TRANSPORT_NAME) from error
        logger.info("connection %d with %s opened", local_id, address)
        return connection, answer

    def probe(
        self, connection: Connection, nbytes: int, repeats: int, timeout_seconds: float
    ) -> ProbeResult:
        """See ``Transport.probe``. nixl does not tell its lanes.

        Raises:
            ValueError: ``nbytes`` or ``repeats`` is out of range, or ``connection`` is not nixl's.
        """
        if not isinstance(connection, NixlConnection):
            raise ValueError(f"connection is a {type(connection).__name__}, not one of nixl")
        probe = self._probes.get(connection.local_id)
        if probe is None:
            raise connection.error or TransportError(
                "not a connection of this transport", transport=TRANSPORT_NAME, peer=connection.peer
            )
        result = probe.ask(nbytes, repeats, timeout_seconds)
        if self._metrics is not None:
            self._metrics.probed(result)
        logger.info(
            "probe of %s: %.3g GB/s with %d bytes, round trip %.3g s",
            result.peer,
            result.gigabytes_per_second,
            result.nbytes,
            result.round_trip_seconds,
        )
        return result

    def close(self, timeout_seconds: float = 5.0) -> None:
        """See ``Transport.close``. Writes that cannot be stopped are waited for, but not for long:
        nixl and their memory are then kept until the process ends."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._worker.submit(self._close_everything)
        if not self._worker.stop(min(timeout_seconds, _LINGER_SECONDS / 0.7)):
            logger.error("the nixl owner thread did not end within %s s", timeout_seconds)

    def _greet(
        self, address: Address, ip: str, hello: bytes, local_id: int, deadline: float
    ) -> tuple[socket.socket, bytes]:
        """Connects and says hello; returns the socket and the listener's answer."""
        try:
            link = socket.create_connection(
                (ip, address.port), max(deadline - time.monotonic(), 1e-3)
            )
        except OSError as error:
            raise connect_failed(address, f"{error}", TRANSPORT_NAME) from error
        try:
            greeting = Greeting(status=Status.HELLO, connection_id=local_id, body=hello)
            link.sendall(greeting.encode())
            header = decode_header(receive_exactly(link, HEADER_BYTES, deadline))
            answer = header.with_body(receive_exactly(link, header.body_bytes, deadline))
        except (OSError, BadGreeting) as error:
            link.close()
            reason = f"the listener's answer {error}"
            raise connect_failed(address, reason, TRANSPORT_NAME) from error
        if answer.status is not Status.ACCEPTED:
            link.close()
            raise HandshakeRejected(
                f"hello refused: {answer.body.decode(errors='replace')}",
                transport=TRANSPORT_NAME,
                peer=str(address),
            )
        return link, answer.body

    def _adopt(self, link: socket.socket, local_id: int, peer: str, result: OwnerResult) -> None:
        connection = self._open_connection(link, local_id, peer)
        connection.begin()
        connection.link.start()
        if not result.set(connection):
            connection.close("nobody waits for this connection any more")

    def _take_in(self, listener: socket.socket, accept: AcceptCallback) -> None:
        while True:
            try:
                link, peer = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                logger.warning("a client went away while it connected: %s", error)
                return
            connection = self._open_connection(link, next(self._ids), str(Address(*peer)))
            self._wait_for_hello(connection, accept)

    def _wait_for_hello(self, connection: NixlConnection, accept: AcceptCallback) -> None:
        seconds = self._settings.handshake_timeout_seconds
        timer = self._worker.call_at(
            time.monotonic() + seconds, lambda: connection.close(f"no hello within {seconds} s")
        )

        def on_greeting(hello: Greeting) -> None:
            timer.cancel()
            status, answer = judge(accept, hello, connection)
            if status is Status.REJECTED:
                self._reject(connection, answer)
                return
            self._answer(connection, status, answer)
            connection.begin()
            logger.info("connection %d with %s accepted", connection.local_id, connection.peer)

        def on_bad(bad: ValueError) -> None:
            timer.cancel()
            self._reject(connection, f"hello {bad}".encode())

        connection.on_bad_greeting = on_bad
        connection.link.start(on_greeting)

    def _reject(self, connection: NixlConnection, reason: bytes) -> None:
        words = reason.decode(errors="replace")
        logger.info("connection with %s refused: %s", connection.peer, words)
        self._answer(connection, Status.REJECTED, reason)
        self._worker.call_at(
            time.monotonic() + _REJECTION_LINGER_SECONDS,
            lambda: connection.close(f"refused: {words}"),
        )

    def _answer(self, connection: NixlConnection, status: Status, body: bytes) -> None:
        greeting = Greeting(status=status, connection_id=connection.local_id, body=body)
        connection.link.send_raw(greeting.encode())

    def _open_connection(self, link: socket.socket, local_id: int, peer: str) -> NixlConnection:
        connection = NixlConnection(
            worker=self._worker,
            connection=link,
            local_id=local_id,
            peer=peer,
            max_unclaimed_offers=self._settings.max_unclaimed_offers,
            slowest_bytes_per_second=self._settings.slowest_bytes_per_second,
            metrics=self._metrics,
        )
        self._connections[local_id] = connection
        self._probes[local_id] = NixlProbe(
            connection, self._probe_pool, self._settings.max_probe_bytes
        )
        if self._metrics is not None:
            self._metrics.connection_opened(peer, TRANSPORT_NAME)
        connection.add_closed_callback(lambda error: self._forget(connection))
        return connection

    def _close_everything(self) -> None:
        if self._listener is not None:
            self._worker.unwatch(self._listener)
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close("transport closed by this side")

    def _forget(self, connection: NixlConnection) -> None:
        self._connections.pop(connection.local_id, None)
        self._probes.pop(connection.local_id, None)
        if self._metrics is not None:
            self._metrics.connection_closed(connection.peer, TRANSPORT_NAME)

    def _cannot_listen(self, host: str, port: int, reason: str) -> TransportError:
        return TransportError(
            f"cannot listen: {reason}",
            transport=TRANSPORT_NAME,
            peer=f"{host}:{port}",
            hint="is the port in use? Port 0 takes any free one",
        )

    def _require_open(self, peer: str) -> None:
        if self._closed:
            raise TransportClosed("the transport is closed", transport=TRANSPORT_NAME, peer=peer)
