"""The listening side of the ucxx transport: takes clients in, or refuses them with a reason."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from ucxx._lib import libucxx

from data_plane.greeting import BadGreeting, Greeting, Status, judge
from data_plane.interfaces import ANY_ADDRESS
from data_plane.listening_address import accept_only_at
from data_plane.transport import AcceptCallback, Address
from data_plane.ucxx_connection import UcxxConnection
from data_plane.ucxx_endpoint_query import query_endpoint
from data_plane.ucxx_greeting import receive_greeting, send_greeting
from data_plane.ucxx_worker import UCX_ERRORS, UcxxWorker

logger = logging.getLogger(__name__)

_REJECTION_LINGER_SECONDS = 1.0
"""How long a refused client has to read the reason: closing at once would take it back."""


class UcxxListener:
    """Listens until ``close``. Created and used on the owner thread.

    ucxx binds every interface: connections to an address other than ``ip`` are dropped by the
    kernel, or closed as they arrive where it takes no filter, unless ``ip`` is 0.0.0.0.

    Args:
        worker: drives it.
        ip: address of this machine that clients must have connected to.
        port: 0 takes any free one.
        accept: judges each hello.
        open_connection: makes a connection of an endpoint and a peer's name.
        handshake_timeout_seconds: how long a client may take to say hello.

    Raises:
        UCX_ERRORS: the port is in use.
    """

    def __init__(
        self,
        *,
        worker: UcxxWorker,
        ip: str,
        port: int,
        accept: AcceptCallback,
        open_connection: Callable[[Any, str], UcxxConnection],
        handshake_timeout_seconds: float,
    ) -> None:
        self._worker = worker
        self._ip = ip
        self._accept = accept
        self._open_connection = open_connection
        self._handshake_timeout_seconds = handshake_timeout_seconds
        self._listener: Any = libucxx.UCXListener.create(
            worker.ucp, port, self._on_connection_request
        )
        self.port: int = self._listener.port
        if ip != ANY_ADDRESS:
            try:
                accept_only_at(ip, self.port)
            except OSError as error:
                logger.warning(
                    "port %d is open on every address of this machine, not on %s alone: %s; "
                    "let a firewall close it elsewhere",
                    self.port,
                    ip,
                    error,
                )

    def close(self) -> None:
        """Takes no more clients; connections stay."""
        self._listener = None

    def _on_connection_request(self, request: int) -> None:
        # Called in the middle of UCX's progress; the handle stays valid until it is used.
        self._worker.submit(lambda: self._take_in(request))

    def _take_in(self, request: int) -> None:
        if self._listener is None:
            return
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except UCX_ERRORS as error:
            logger.warning("a client went away while it connected: %s", error)
            return
        info = query_endpoint(endpoint.handle)
        peer = str(Address(*info.remote)) if info.remote[0] else "unknown"
        connection = self._open_connection(endpoint, peer)
        if self._ip != ANY_ADDRESS and info.local[0] not in ("", self._ip):
            connection.close(f"came to {info.local[0]}, listening on {self._ip} only")
            return
        self._wait_for_hello(connection)

    def _wait_for_hello(self, connection: UcxxConnection) -> None:
        seconds = self._handshake_timeout_seconds
        timer = self._worker.call_at(
            time.monotonic() + seconds, lambda: connection.close(f"no hello within {seconds} s")
        )

        def on_greeting(hello: Greeting) -> None:
            timer.cancel()
            self._judge(connection, hello)

        def on_bad(bad: BadGreeting) -> None:
            timer.cancel()
            self._reject(connection, f"hello {bad}")

        receive_greeting(connection, on_greeting, on_bad)

    def _judge(self, connection: UcxxConnection, hello: Greeting) -> None:
        if hello.status is Status.HELLO:
            connection.remote_id = hello.connection_id
        status, answer = judge(self._accept, hello, connection)
        if status is Status.REJECTED:
            self._reject(connection, answer.decode(errors="replace"))
            return
        self._answer(connection, Status.ACCEPTED, answer)
        logger.info("connection %d with %s accepted", connection.local_id, connection.peer)

    def _reject(self, connection: UcxxConnection, reason: str) -> None:
        logger.info("connection with %s refused: %s", connection.peer, reason)
        self._answer(connection, Status.REJECTED, reason.encode())
        self._worker.call_at(
            time.monotonic() + _REJECTION_LINGER_SECONDS,
            lambda: connection.close(f"refused: {reason}"),
        )

    def _answer(self, connection: UcxxConnection, status: Status, body: bytes) -> None:
        greeting = Greeting(status=status, connection_id=connection.local_id, body=body)
        send_greeting(connection, greeting, on_sent=lambda: None)
