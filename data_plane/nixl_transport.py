"""The nixl transport: listening, connecting and closing.

nixl carries RDMA (InfiniBand, RoCE, EFA) in its wheel, and writes straight into the offered buffer.
IPv4 only, as the ucxx transport.
"""

from __future__ import annotations

import itertools
import logging
import select
import socket
import time
from typing import TYPE_CHECKING, ClassVar, Final

from data_plane.addresses import connect_failed, local_ip, resolve
from data_plane.base_transport import COMMAND_TIMEOUT_SECONDS, BaseTransport, check_hello_length
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
from data_plane.transport import AcceptCallback, Address, Connection, HandshakeRejected

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_REJECTION_LINGER_SECONDS = 1.0
"""How long a refused client has to read the reason."""

_LINGER_SECONDS = 1.0
"""How long a closing transport waits for writes that cannot be stopped."""


class NixlTransport(BaseTransport[NixlConnection, NixlWorker]):
    """Implements ``Transport`` with nixl. Starts its owner thread at once; ``close`` ends it.

    nixl does not tell its lanes, so a probe names none.

    Args:
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.

    Raises:
        ImportError: nixl is not installed; says what to install.
        RuntimeError: nixl did not start.
    """

    connection_type = NixlConnection
    # The worker spends 0.7 of it waiting for writes, and nixl and their memory are then kept
    # until the process ends.
    longest_stop_seconds: ClassVar[float] = _LINGER_SECONDS / 0.7

    def __init__(
        self, settings: NixlSettings | None = None, metrics: DataPlaneMetrics | None = None
    ) -> None:
        self._settings = settings or NixlSettings()
        self._ids = itertools.count()
        self._listener: socket.socket | None = None
        super().__init__(NixlWorker(self._settings), self._settings, metrics)

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
        check_hello_length(hello)
        self._require_open(str(address))
        deadline = time.monotonic() + timeout_seconds
        ip = resolve(address, timeout_seconds, TRANSPORT_NAME)
        local_id = next(self._ids)
        link, answer = self._greet(address, ip, hello, local_id, deadline)
        result = OwnerResult()
        self._worker.submit(lambda: self._adopt(link, local_id, str(address), result))
        try:
            connection: NixlConnection = result.get(COMMAND_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise connect_failed(address, str(error), TRANSPORT_NAME) from error
        logger.info("connection %d with %s opened", local_id, address)
        return connection, answer

    def _new_probe(self, connection: NixlConnection) -> NixlProbe:
        return NixlProbe(connection, self._probe_pool, self._max_probe_bytes)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._worker.unwatch(self._listener)
            self._listener.close()

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
        self._keep(connection)
        return connection
