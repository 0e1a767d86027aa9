"""The ucxx transport: listening, connecting and closing. The default network of the data plane.

UCX chooses among NVLink (cuda_ipc), InfiniBand, shared memory and TCP by itself. IPv4 only: ucxx
opens its listeners there.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from ucxx._lib import libucxx

from data_plane.addresses import local_ip
from data_plane.base_transport import (
    COMMAND_TIMEOUT_SECONDS,
    BaseTransport,
    say_that_ports_are_open,
)
from data_plane.connector import Connector
from data_plane.interfaces import interface_of, source_ip
from data_plane.metrics import DropCause
from data_plane.owner_thread import OwnerResult
from data_plane.silent_sockets import HasSpoken, has_sent_a_message
from data_plane.transport import (
    AcceptCallback,
    Address,
    ConnectFailed,
    NetworkRestarted,
)
from data_plane.ucxx.arrivals import Arrivals
from data_plane.ucxx.connection import TRANSPORT_NAME, UcxxConnection
from data_plane.ucxx.listener import UcxxListener
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.worker import UCX_ERRORS, UcxxWorker

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

_LISTEN_AGAIN_SECONDS = 10.0


class UcxxTransport(BaseTransport[UcxxConnection, UcxxWorker]):
    """Implements ``Transport`` with ucxx. Starts its owner thread at once; ``close`` ends it.

    Args:
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.
    """

    connection_type = UcxxConnection

    def __init__(
        self, settings: UcxxSettings | None = None, metrics: DataPlaneMetrics | None = None
    ) -> None:
        self._settings = settings or UcxxSettings()
        self._listener: UcxxListener | None = None
        worker = UcxxWorker(
            self._settings, lambda message: self._arrivals.arrive(message), self._start_anew
        )
        self._arrivals = Arrivals(
            discard=worker.discard,
            call_at=worker.call_at,
            on_dropped=self._on_dropped,
            max_messages=self._settings.max_unclaimed_messages,
            max_bytes=self._settings.max_unclaimed_bytes,
            max_seconds=self._settings.max_unclaimed_seconds,
        )
        super().__init__(worker, self._settings, metrics)
        self._watch_ports()

    def listen(self, host: str, port: int, accept: AcceptCallback) -> Address:
        """See ``Transport.listen``; once per transport."""
        self._require_open(f"{host}:{port}")
        ip = local_ip(host, port, TRANSPORT_NAME)
        result = OwnerResult()
        self._worker.submit(lambda: self._start_listening(ip, port, accept, result))
        try:
            bound_port = result.get(COMMAND_TIMEOUT_SECONDS)
        except (*UCX_ERRORS, TimeoutError) as error:
            raise self._cannot_listen(host, port, error) from error
        logger.info("listening on %s:%d", host, bound_port)
        say_that_ports_are_open(ip)
        return Address(host, bound_port)

    def _reach(self, ip: str, connector: Connector) -> None:
        self._require_way(connector.address, ip)
        self._worker.submit(lambda: self._open_towards(ip, connector))

    def _open_towards(self, ip: str, connector: Connector) -> None:
        address = connector.address
        try:
            endpoint = libucxx.UCXEndpoint.create(self._worker.ucp, ip, address.port, True)
        except UCX_ERRORS as error:
            connector.give_up(f"{type(error).__name__}: {error}")
            return
        connection = self._open_connection(endpoint, str(address))
        connector.greet(
            connection,
            lambda: connection.ends(listening=False),
            on_deadline=self._worker.check_shared_memory,
        )

    def _require_way(self, address: Address, ip: str) -> None:
        """Raises ConnectFailed if the way to ``ip`` leaves by an interface that UCX may not use:
        UCX itself says no more than that the connection was lost."""
        settings = self._settings
        bound = None if settings.rdma else settings.bound_interface()
        if bound is None:
            return
        source = source_ip(ip)
        interface = None if source is None else interface_of(source)
        if interface in (None, bound):
            return
        raise ConnectFailed(
            f"the way there leaves by {interface} ({source}), but data_host "
            f"{settings.data_host} lets UCX use {bound} alone",
            transport=TRANSPORT_NAME,
            peer=str(address),
            hint=f"give --data-host {source}, or name the interfaces in UCX_NET_DEVICES",
        )

    def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.close()

    def _start_listening(
        self, ip: str, port: int, accept: AcceptCallback, result: OwnerResult
    ) -> None:
        if self._listener is not None:
            result.set(RuntimeError("this transport listens already"))
            return
        try:
            self._listener = self._new_listener(ip, port, accept)
        except UCX_ERRORS as error:
            result.set(error)
            return
        self._watch_ports()
        result.set(self._listener.port)

    def _new_listener(self, ip: str, port: int, accept: AcceptCallback) -> UcxxListener:
        return UcxxListener(
            worker=self._worker,
            ip=ip,
            port=port,
            accept=accept,
            newcomers=self._newcomers,
            on_refused=self._on_refused,
            open_connection=self._open_connection,
        )

    def _watch_ports(self) -> None:
        """Has connections ended that say nothing to UCX."""
        ports: dict[int, HasSpoken] = dict.fromkeys(self._worker.ports, has_sent_a_message)
        if self._listener is not None:
            ports[self._listener.port] = self._listener.knows
        self._silent_sockets.watch(ports)

    def _start_anew(self) -> None:
        """The worker gets nothing from this host any more: ends its connections, and goes on with a
        new one that listens where the old one did. Owner thread."""
        if self._closed:
            return
        logger.warning(
            "a process of this host died or stopped while it wrote to this one, and UCX hears "
            "nothing over shared memory since: %d connections end, and UCX is started anew",
            len(self._connections),
        )
        if self._metrics is not None:
            self._metrics.series.restarts_total.labels(TRANSPORT_NAME).inc()
        listener = self._listener
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.fail(
                NetworkRestarted(
                    "connection lost: UCX is started anew on this side",
                    transport=TRANSPORT_NAME,
                    peer=connection.peer,
                    hint="a process of this host died or stopped while it wrote to this one",
                )
            )
        self._arrivals.clear()
        self._worker.replace()
        self._watch_ports()
        if listener is not None:
            self._listen_again(listener, time.monotonic() + _LISTEN_AGAIN_SECONDS)

    def _listen_again(self, old: UcxxListener, deadline: float) -> None:
        try:
            self._listener = self._new_listener(old.ip, old.port, old.accept)
            self._watch_ports()
        except UCX_ERRORS as error:
            if time.monotonic() < deadline:
                self._worker.call_at(
                    time.monotonic() + 0.1, lambda: self._listen_again(old, deadline)
                )
                return
            logger.error("cannot listen on %s:%d any more: %s", old.ip, old.port, error)

    def _open_connection(self, endpoint: Any, peer: str) -> UcxxConnection:
        connection = UcxxConnection(
            self._worker,
            endpoint,
            peer,
            self._arrivals,
            self._settings.slowest_bytes_per_second,
            self._metrics,
        )
        self._keep(connection)
        return connection

    def _close_everything(self) -> None:
        super()._close_everything()
        self._arrivals.clear()

    def _on_dropped(self, cause: DropCause) -> None:
        logger.debug("a message was dropped: %s", cause)
        if self._metrics is not None:
            self._metrics.series.messages_dropped_total.labels(TRANSPORT_NAME, cause).inc()
