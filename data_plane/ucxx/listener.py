"""The listening side of the ucxx transport: takes clients in, or refuses them with a reason."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from ucxx._lib import libucxx

from data_plane.handshake import HandshakeFailure
from data_plane.interfaces import ANY_ADDRESS
from data_plane.listening_address import accept_only_at
from data_plane.newcomers import Newcomers
from data_plane.process_sockets import Accepted
from data_plane.transport import AcceptCallback, Address, TransportError
from data_plane.ucxx.connection import UcxxConnection
from data_plane.ucxx.endpoint_query import query_endpoint
from data_plane.ucxx.worker import UCX_ERRORS, UcxxWorker

logger = logging.getLogger(__name__)

_CLIENTS_A_TURN: Final = 4
"""Taking in a client costs a millisecond, and messages of others wait meanwhile."""


class UcxxListener:
    """Listens until ``close``. Created and used on the owner thread.

    ucxx binds every interface: connections to an address other than ``ip`` are dropped by the
    kernel, or closed as they arrive where it takes no filter, unless ``ip`` is 0.0.0.0.

    Args:
        worker: drives it.
        ip: address of this machine that clients must have connected to.
        port: 0 takes any free one.
        accept: judges each client.
        newcomers: takes clients in, or refuses them.
        on_refused: called for each client that is not taken in.
        open_connection: makes a connection of an endpoint and a peer's name.

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
        newcomers: Newcomers,
        on_refused: Callable[[HandshakeFailure], None],
        open_connection: Callable[[Any, str], UcxxConnection],
    ) -> None:
        self._worker = worker
        self.ip = ip
        self.accept = accept
        self._on_refused = on_refused
        self._open_connection = open_connection
        self._arrived: deque[int] = deque()
        self._taking_in = False
        self._newcomers = newcomers
        self._taken_in: dict[tuple[str, int], UcxxConnection] = {}
        self._sees_addresses = True
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

    def knows(self, accepted: Accepted) -> bool:
        """Returns whether a TCP connection to this port is of a client that UCX has mentioned. Any
        thread."""
        return accepted.peer in self._taken_in or not self._sees_addresses

    def _on_connection_request(self, request: int) -> None:
        # Called in the middle of UCX's progress; the handle stays valid until it is used.
        self._arrived.append(request)
        self._worker.submit(self._begin_taking_in)

    def _begin_taking_in(self) -> None:
        if not self._taking_in:
            self._taking_in = True
            self._take_some_in()

    def _take_some_in(self) -> None:
        for _ in range(min(len(self._arrived), _CLIENTS_A_TURN)):
            self._take_in(self._arrived.popleft())
        if self._arrived:
            self._worker.submit(self._take_some_in)
        else:
            self._taking_in = False

    def _take_in(self, request: int) -> None:
        if self._listener is None:
            return
        try:
            endpoint = self._listener.create_endpoint_from_conn_request(request, True)
        except UCX_ERRORS as error:
            logger.info("a client went away while it connected: %s", error)
            self._on_refused(HandshakeFailure.LOST)
            return
        info = query_endpoint(endpoint.handle)
        client = str(Address(*info.remote)) if info.remote[0] else "unknown"
        connection = self._open_connection(endpoint, client)
        self._remember(connection, info.remote)
        if self.ip != ANY_ADDRESS and info.local[0] not in ("", self.ip):
            connection.close(f"came to {info.local[0]}, listening on {self.ip} only")
            return
        ends = connection.ends(listening=True)
        self._newcomers.challenge(connection, info.remote[0], ends, self.accept)

    def _remember(self, connection: UcxxConnection, remote: tuple[str, int]) -> None:
        """Keeps whose a TCP connection to this port is, while there is one."""
        if not remote[0]:
            self._sees_addresses = False
            return
        self._taken_in[remote] = connection

        def forget(error: TransportError | None) -> None:
            if self._taken_in.get(remote) is connection:
                del self._taken_in[remote]

        connection.add_closed_callback(forget)
