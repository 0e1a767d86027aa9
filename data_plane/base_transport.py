"""The common parts of the transports: their connections and probes, and opening and closing.

One connection's probe and metrics live as long as the connection is in the transport's books.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Final, Generic, TypeVar

from data_plane.addresses import connect_failed, resolve
from data_plane.base_connection import BaseConnection
from data_plane.buffer_pool import BufferPool
from data_plane.connector import Connector
from data_plane.half_open import half_open_limit
from data_plane.handshake import ClientHandshake, HandshakeFailure
from data_plane.interfaces import is_private
from data_plane.newcomers import Newcomers
from data_plane.owner_thread import OwnerResult, OwnerThread
from data_plane.probe_endpoint import ProbeEndpoint
from data_plane.silent_sockets import SilentSockets
from data_plane.transport import (
    MAX_HELLO_BYTES,
    Address,
    Connection,
    ProbeResult,
    TransportClosed,
    TransportError,
)
from data_plane.ucx_options import UcxSettings
from distca.machine_errors import refusal

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)


@cache
def say_that_ports_are_open(ip: str) -> None:
    """Warns, once for each address, that anybody who reaches UCX's ports there can end the process;
    nothing of loopback, or of a WireGuard interface."""
    if is_private(ip):
        return
    logger.warning(
        "whoever reaches UCX's ports at %s can end this process, mutual TLS or not: let members "
        "alone reach them, or encrypt the network (docs/security.md)",
        ip,
    )


COMMAND_TIMEOUT_SECONDS: Final = 5.0
"""How long the owner thread may take for a command that waits for nobody else."""

ConnectionT = TypeVar("ConnectionT", bound=BaseConnection)
WorkerT = TypeVar("WorkerT", bound=OwnerThread)


class BaseTransport(Generic[ConnectionT, WorkerT]):
    """Implements ``Transport`` but for listening and for reaching a listener. Starts ``worker`` at
    once; ``close`` ends it.

    Args:
        worker: the owner thread of the network library.
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.
    """

    connection_type: type[ConnectionT]
    longest_stop_seconds: ClassVar[float] = float("inf")
    """How long ``close`` waits for the owner thread at most, whatever the caller allows."""

    def __init__(
        self, worker: WorkerT, settings: UcxSettings, metrics: DataPlaneMetrics | None
    ) -> None:
        self._worker = worker
        self._metrics = metrics
        self._max_probe_bytes = settings.max_probe_bytes
        self._probe_pool = BufferPool.on_device(settings.device)
        self._connections: dict[int, ConnectionT] = {}
        self._probes: dict[int, ProbeEndpoint] = {}
        self._closed = False
        self._close_lock = threading.Lock()
        worker.start()
        limit = half_open_limit(settings.max_half_open)
        timeout_seconds = settings.handshake_timeout_seconds
        self._newcomers = Newcomers(
            worker, limit=limit, timeout_seconds=timeout_seconds, on_refused=self._on_refused
        )
        self._silent_sockets = SilentSockets(
            limit=limit, timeout_seconds=timeout_seconds, on_ended=self._on_silent_ended
        )
        # Ends the owner thread before the interpreter takes its modules apart.
        atexit.register(self.close, 1.0)

    @property
    def name(self) -> str:
        return self.connection_type.transport_name

    @property
    def stalled_seconds(self) -> float:
        return self._worker.stalled_seconds

    def connect(
        self, address: Address, hello: bytes, timeout_seconds: float, *, secret: bytes
    ) -> tuple[Connection, bytes]:
        """See ``Transport.connect``."""
        if len(hello) > MAX_HELLO_BYTES:
            raise ValueError(f"hello has {len(hello)} bytes, MAX_HELLO_BYTES={MAX_HELLO_BYTES}")
        self._require_open(str(address))
        deadline = time.monotonic() + timeout_seconds
        ip = resolve(address, timeout_seconds, self.name)
        result = OwnerResult()
        handshake = ClientHandshake(hello, secret)
        self._reach(ip, Connector(address, self.name, handshake, deadline, result))
        try:
            # The owner thread keeps the deadline; the margin is for its answer to arrive.
            connection, answer = result.get(deadline - time.monotonic() + 1.0)
        except TimeoutError as error:
            raise connect_failed(address, str(error), self.name) from error
        logger.info("connection %d with %s opened", connection.local_id, address)
        return connection, answer

    def _reach(self, ip: str, connector: Connector) -> None:
        """Has ``connector`` greet the listener at ``ip`` on the owner thread."""
        raise NotImplementedError

    def probe(
        self, connection: Connection, nbytes: int, repeats: int, timeout_seconds: float
    ) -> ProbeResult:
        """See ``Transport.probe``."""
        if not isinstance(connection, self.connection_type):
            raise ValueError(f"connection is a {type(connection).__name__}, not one of {self.name}")
        probe = self._probes.get(connection.local_id)
        if probe is None:
            raise connection.error or TransportError(
                "not a connection of this transport", transport=self.name, peer=connection.peer
            )
        result = probe.ask(nbytes, repeats, timeout_seconds)
        if self._metrics is not None:
            self._metrics.probed(result)
        logger.info(
            "probe of %s over %s: %.3g GB/s with %d bytes, round trip %.3g s",
            result.peer,
            result.lanes,
            result.gigabytes_per_second,
            result.nbytes,
            result.round_trip_seconds,
        )
        return result

    def close(self, timeout_seconds: float = 5.0) -> None:
        """See ``Transport.close``. Returns after ``timeout_seconds`` even if the library hangs."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._silent_sockets.close()
        self._worker.submit(self._close_everything)
        if not self._worker.stop(min(timeout_seconds, self.longest_stop_seconds)):
            logger.error("the %s owner thread did not end within %s s", self.name, timeout_seconds)

    def _on_refused(self, cause: HandshakeFailure) -> None:
        if self._metrics is not None:
            self._metrics.series.handshakes_refused_total.labels(self.name, cause).inc()

    def _on_silent_ended(self, cause: HandshakeFailure) -> None:
        """Counts a connection that was ended since it said nothing. Any thread."""
        self._on_refused(cause)

    def _stop_listening(self) -> None:
        """Takes no more connections in; nothing if it never did. Owner thread."""
        raise NotImplementedError

    def _close_everything(self) -> None:
        self._stop_listening()
        for connection in list(self._connections.values()):
            connection.close("transport closed by this side")

    def _keep(self, connection: ConnectionT) -> None:
        """Enters a new connection into the books, until it is closed."""
        self._connections[connection.local_id] = connection
        self._probes[connection.local_id] = ProbeEndpoint(
            connection, self._probe_pool, self._max_probe_bytes
        )
        if self._metrics is not None:
            self._metrics.connection_opened(connection.peer, self.name)
        connection.add_closed_callback(lambda error: self._forget(connection))

    def _forget(self, connection: ConnectionT) -> None:
        self._connections.pop(connection.local_id, None)
        self._probes.pop(connection.local_id, None)
        if self._metrics is not None:
            self._metrics.connection_closed(connection.peer, self.name)

    def _require_open(self, peer: str) -> None:
        if self._closed:
            raise TransportClosed("the transport is closed", transport=self.name, peer=peer)

    def _cannot_listen(self, host: str, port: int, cause: BaseException) -> TransportError:
        _, why = refusal(host, port, cause)
        return TransportError(f"cannot listen: {why}", transport=self.name, peer=f"{host}:{port}")
