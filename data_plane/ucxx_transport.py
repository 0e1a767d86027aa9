"""The ucxx transport: listening, connecting and closing. The default network of the data plane.

UCX chooses among NVLink (cuda_ipc), InfiniBand, shared memory and TCP by itself. IPv4 only: ucxx
opens its listeners there.
"""

from __future__ import annotations

import atexit
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from data_plane.addresses import connect_failed, local_ip, resolve
from data_plane.buffer_pool import BufferPool, device_allocator
from data_plane.greeting import MAX_CONNECTION_ID
from data_plane.owner_result import OwnerResult
from data_plane.transport import (
    MAX_HELLO_BYTES,
    AcceptCallback,
    Address,
    Connection,
    ProbeResult,
    TransportClosed,
    TransportError,
)
from data_plane.ucxx_connection import TRANSPORT_NAME, UcxxConnection, split_wire_tag
from data_plane.ucxx_connector import UcxxConnector
from data_plane.ucxx_listener import UcxxListener
from data_plane.ucxx_probe import UcxxProbe
from data_plane.ucxx_settings import UcxxSettings
from data_plane.ucxx_worker import UCX_ERRORS, UcxxWorker

if TYPE_CHECKING:
    from data_plane.metrics import DataPlaneMetrics

logger = logging.getLogger(__name__)

_COMMAND_TIMEOUT_SECONDS = 5.0


class UcxxTransport:
    """Implements ``Transport`` with ucxx. Starts its owner thread at once; ``close`` ends it.

    Args:
        settings: devices, UCX options and limits.
        metrics: counts transfers, failures and probes when given.

    Raises:
        ValueError: UCX refused an option.
        RuntimeError: UCX did not start.
    """

    def __init__(
        self, settings: UcxxSettings | None = None, metrics: DataPlaneMetrics | None = None
    ) -> None:
        self._settings = settings or UcxxSettings()
        self._metrics = metrics
        self._settings.warn_about_environment()
        self._probe_pool = BufferPool(device_allocator(self._settings.device))
        self._connections: dict[int, UcxxConnection] = {}
        self._probes: dict[int, UcxxProbe] = {}
        self._listener: UcxxListener | None = None
        self._closed = False
        self._close_lock = threading.Lock()
        self._worker = UcxxWorker(self._settings, self._on_message)
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
        result = OwnerResult()
        self._worker.submit(lambda: self._start_listening(ip, port, accept, result))
        try:
            bound_port = result.get(_COMMAND_TIMEOUT_SECONDS)
        except (*UCX_ERRORS, TimeoutError) as error:
            raise TransportError(
                f"cannot listen: {type(error).__name__}: {error}",
                transport=TRANSPORT_NAME,
                peer=f"{host}:{port}",
                hint="is the port in use? Port 0 takes any free one",
            ) from error
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
        result = OwnerResult()
        connector = UcxxConnector(self._worker, address, result)
        self._worker.submit(lambda: connector.start(ip, hello, deadline, self._open_connection))
        try:
            # The owner thread keeps the deadline; the margin is for its answer to arrive.
            connection, answer = result.get(deadline - time.monotonic() + 1.0)
        except TimeoutError as error:
            raise connect_failed(address, str(error), TRANSPORT_NAME) from error
        logger.info("connection %d with %s opened", connection.local_id, address)
        return connection, answer

    def probe(
        self, connection: Connection, nbytes: int, repeats: int, timeout_seconds: float
    ) -> ProbeResult:
        """See ``Transport.probe``.

        Raises:
            ValueError: ``nbytes`` or ``repeats`` is out of range, or ``connection`` is not ucxx's.
        """
        if not isinstance(connection, UcxxConnection):
            raise ValueError(f"connection is a {type(connection).__name__}, not one of ucxx")
        probe = self._probes.get(connection.local_id)
        if probe is None:
            raise connection.error or TransportError(
                "not a connection of this transport", transport=TRANSPORT_NAME, peer=connection.peer
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
        """See ``Transport.close``. Returns after ``timeout_seconds`` even if UCX hangs."""
        with self._close_lock:
            if self._closed:
                return
            self._closed = True
        atexit.unregister(self.close)
        self._worker.submit(self._close_everything)
        if not self._worker.stop(timeout_seconds):
            logger.error("the ucxx owner thread did not end within %s s", timeout_seconds)

    def _close_everything(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in list(self._connections.values()):
            connection.close("transport closed by this side")

    def _start_listening(
        self, ip: str, port: int, accept: AcceptCallback, result: OwnerResult
    ) -> None:
        if self._listener is not None:
            result.set(RuntimeError("this transport listens already"))
            return
        try:
            self._listener = UcxxListener(
                worker=self._worker,
                ip=ip,
                port=port,
                accept=accept,
                open_connection=self._open_connection,
                handshake_timeout_seconds=self._settings.handshake_timeout_seconds,
            )
        except UCX_ERRORS as error:
            result.set(error)
            return
        result.set(self._listener.port)

    def _open_connection(self, endpoint: Any, peer: str) -> UcxxConnection:
        connection = UcxxConnection(
            worker=self._worker,
            endpoint=endpoint,
            local_id=self._new_connection_id(),
            peer=peer,
            max_unclaimed_messages=self._settings.max_unclaimed_messages,
            slowest_bytes_per_second=self._settings.slowest_bytes_per_second,
            metrics=self._metrics,
        )
        self._connections[connection.local_id] = connection
        self._probes[connection.local_id] = UcxxProbe(
            connection, self._probe_pool, self._settings.max_probe_bytes
        )
        if self._metrics is not None:
            self._metrics.connection_opened(peer, TRANSPORT_NAME)
        connection.add_closed_callback(lambda error: self._forget(connection))
        return connection

    def _new_connection_id(self) -> int:
        while True:
            # Random: a stray message of an earlier connection should meet nobody.
            candidate = secrets.randbelow(MAX_CONNECTION_ID + 1)
            if candidate not in self._connections:
                return candidate

    def _forget(self, connection: UcxxConnection) -> None:
        self._connections.pop(connection.local_id, None)
        self._probes.pop(connection.local_id, None)
        if self._metrics is not None:
            self._metrics.connection_closed(connection.peer, TRANSPORT_NAME)

    def _on_message(self, message: Any) -> None:
        connection_id, channel, tag = split_wire_tag(message.sender_tag.value)
        connection = self._connections.get(connection_id)
        if connection is None:
            logger.debug("discarding %d bytes for no connection", message.length)
            self._worker.discard(message)
            return
        connection.deliver(channel, tag, message)

    def _require_open(self, peer: str) -> None:
        if self._closed:
            raise TransportClosed("the transport is closed", transport=TRANSPORT_NAME, peer=peer)
