"""The nixl transport: listening, connecting and closing.

nixl carries RDMA (InfiniBand, RoCE) in its wheel, and writes straight into the offered buffer.
IPv4 only, as the ucxx transport.
"""

from __future__ import annotations

import logging
import select
import socket
import time
from typing import TYPE_CHECKING, ClassVar, Final

from data_plane.addresses import connect_failed, local_ip
from data_plane.base_transport import BaseTransport, say_that_ports_are_open
from data_plane.connector import Connector
from data_plane.handshake import HandshakeFailure
from data_plane.interfaces import ipv4_of, own_addresses
from data_plane.listening_address import accept_only_from
from data_plane.nixl.connection import NixlConnection
from data_plane.nixl.settings import NixlSettings
from data_plane.nixl.worker import NixlWorker
from data_plane.proof import Ends
from data_plane.silent_sockets import has_sent_a_message
from data_plane.transport import AcceptCallback, Address, TransportError

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_CLIENTS_A_TURN: Final = 16
"""Messages of others wait meanwhile."""
_NO_FILES_SECONDS: Final = 0.1
_CONNECTED_SECONDS: Final = 0.5
"""A connection of an agent to itself is there by then."""

_LINGER_SECONDS = 1.0
"""How long a closing transport waits for writes that cannot be stopped."""


class NixlTransport(BaseTransport[NixlConnection, NixlWorker]):
    """Implements ``Transport`` with nixl. Starts its owner thread at once; ``close`` ends it.

    nixl does not name its lanes, so a probe names none.

    Args:
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.
    """

    connection_type = NixlConnection
    # The worker spends 0.7 of it waiting for writes, and nixl and their memory are then kept
    # until the process ends.
    longest_stop_seconds: ClassVar[float] = _LINGER_SECONDS / 0.7

    def __init__(
        self, settings: NixlSettings | None = None, metrics: DataPlaneMetrics | None = None
    ) -> None:
        self._settings = settings or NixlSettings()
        self._listener: socket.socket | None = None
        # Whom UCX's ports take connections from: UCX connects from the interface that the link
        # does too, once the link has proven whose it is. None: it may use any interface.
        is_bound = self._settings.bound_interface() is not None
        self._members = own_addresses() if is_bound else None
        self._ucx_ports: frozenset[int] = frozenset()
        super().__init__(NixlWorker(self._settings), self._settings, metrics)
        self._worker.submit(lambda: self._worker.memory.tell_ports(self._watch_ports))

    def listen(self, host: str, port: int, accept: AcceptCallback) -> Address:
        """See ``Transport.listen``; once per transport."""
        self._require_open(f"{host}:{port}")
        ip = local_ip(host, port, self.name)
        if self._listener is not None:
            raise TransportError(
                "this transport listens already", transport=self.name, peer=f"{host}:{port}"
            )
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ip, port))
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise self._cannot_listen(host, port, error) from error
        listener.setblocking(False)
        self._listener = listener
        self._worker.submit(lambda: self._watch_listener(listener, accept))
        bound_port = int(listener.getsockname()[1])
        logger.info("listening on %s:%d", host, bound_port)
        if self._members is None:
            say_that_ports_are_open(ip)
        return Address(host, bound_port)

    def _reach(self, ip: str, connector: Connector) -> None:
        address, seconds = connector.address, max(connector.deadline - time.monotonic(), 1e-3)
        try:
            link = socket.create_connection((ip, address.port), seconds, self._source)
            ends = _ends(client=link.getsockname(), server=link.getpeername())
        except OSError as error:
            raise connect_failed(address, f"{error}", self.name) from error
        self._worker.submit(
            lambda: connector.greet(
                self._open_connection(link, str(address)),
                lambda: ends,
                on_proven=lambda: self._admit(ip),
            )
        )

    def _watch_ports(self, ports: frozenset[int]) -> None:
        """Has connections ended that say nothing to nixl's UCX, and closes its ports to strangers.
        Owner thread."""
        self._ucx_ports = ports
        self._close_to_strangers()
        self._silent_sockets.watch(dict.fromkeys(ports, has_sent_a_message))
        # An agent connects to itself, and says so only when it is driven.
        self._worker.call_at(
            time.monotonic() + _CONNECTED_SECONDS, lambda: self._worker.memory.agent.progress()
        )

    def _admit(self, host: str) -> None:
        """Opens UCX's ports to the host of a peer that has proven itself. Owner thread."""
        if self._members is not None and host not in self._members:
            self._members.add(host)
            self._close_to_strangers()

    def _close_to_strangers(self) -> None:
        if self._members is None:
            return
        for port in self._ucx_ports:
            try:
                accept_only_from(self._members, port)
            except OSError as error:
                logger.warning("UCX's port %d is open to every host: %s", port, error)

    def _on_silent_ended(self, cause: HandshakeFailure) -> None:
        super()._on_silent_ended(cause)
        # Else nixl's UCX would not close the descriptor before the next message.
        self._worker.submit(lambda: self._worker.memory.agent.progress())

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._worker.unwatch(self._listener)
            self._listener.close()

    @property
    def _source(self) -> tuple[str, int] | None:
        """The address where links begin: the one that UCX is bound to."""
        data_host = self._settings.data_host
        return None if self._members is None or data_host is None else (ipv4_of(data_host), 0)

    def _watch_listener(self, listener: socket.socket, accept: AcceptCallback) -> None:
        if not self._closed:
            self._worker.watch(
                listener, select.EPOLLIN, lambda events: self._take_some_in(listener, accept)
            )

    def _take_some_in(self, listener: socket.socket, accept: AcceptCallback) -> None:
        for _ in range(_CLIENTS_A_TURN):
            try:
                link, peer = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError as error:
                logger.info("a client went away while it connected: %s", error)
                continue
            except OSError as error:
                self._make_room(listener, accept, error)
                return
            self._take_in(link, peer, accept)

    def _make_room(self, listener: socket.socket, accept: AcceptCallback, error: OSError) -> None:
        """No client can be taken in, for want of files: one that has not said hello goes, and the
        next is tried a moment later."""
        made = self._newcomers.put_one_out()
        logger.warning(
            "no client can be taken in: %s%s", error, "; the oldest goes" if made else ""
        )
        self._worker.unwatch(listener)
        self._worker.call_at(
            time.monotonic() + _NO_FILES_SECONDS, lambda: self._watch_listener(listener, accept)
        )

    def _take_in(self, link: socket.socket, peer: tuple[str, int], accept: AcceptCallback) -> None:
        connection = self._open_connection(link, str(Address(*peer)))
        ends = _ends(client=peer, server=link.getsockname())
        self._newcomers.challenge(
            connection, peer[0], ends, accept, on_proven=lambda: self._admit(peer[0])
        )

    def _open_connection(self, link: socket.socket, peer: str) -> NixlConnection:
        connection = self.connection_type(
            self._worker,
            link,
            peer,
            self._settings.max_unclaimed_offers,
            self._settings.slowest_bytes_per_second,
            self._metrics,
        )
        self._keep(connection)
        return connection


def _ends(*, client: tuple[str, int], server: tuple[str, int]) -> Ends:
    return Ends(client=str(Address(*client)), server=str(Address(*server)))
