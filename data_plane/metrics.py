"""Prometheus metrics of the data plane. Scraping only reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry

from data_plane.handshake import HandshakeFailure
from distca.metric_table import Label, Reading, ReadTable, Table, counter, gauge, histogram

if TYPE_CHECKING:
    from data_plane.buffer_pool import BufferPool
    from data_plane.transport import ProbeResult, TransportError
    from data_plane.transport_choice import TransportChoice

OTHER_PEERS = "other"
"""Label of the peers beyond ``max_peers``."""

_LARGE_MESSAGE_BYTES = 2**18

Peer = tuple[str, str]
"""A peer, by address or by label, and the transport that reaches it."""


class DropCause(StrEnum):
    """Why a message that came was not used."""

    UNEXPECTED = "unexpected"
    """Nobody expected it for as long as a message may wait, or it came twice."""
    NO_ROOM = "no-room"
    """Too many wait that nobody expects."""
    LATE = "late"
    """Its connection has ended."""
    UNPROVEN = "unproven"
    """It does not carry the connection's key."""


_PREFIX = "distca_data_plane"
_PEER = Label("peer")
_TRANSPORT = Label("transport")
_DIRECTION = Label("kind", ("offer", "put"))
_POOL = Label("pool")


class DataPlaneTable(Table):
    """Transfers, connections and what was not used."""

    prefix = _PREFIX

    sent_bytes_total = counter("Bytes of messages handed to the network.", _PEER, _TRANSPORT)
    received_bytes_total = counter("Bytes of messages received.", _PEER, _TRANSPORT)
    transfer_seconds = histogram(
        "Seconds of a finished transfer: a put since it was asked for, an offer since its "
        "message arrived.",
        _DIRECTION,
        _TRANSPORT,
    )
    receive_bytes_per_second = gauge(
        "Rate of the last received message of 256 KiB or more, from its arrival on.",
        _PEER,
        _TRANSPORT,
    )
    probe_bytes_per_second = gauge(
        "Result of the last bandwidth probe; lanes are the network paths that UCX chose.",
        _PEER,
        _TRANSPORT,
        Label("lanes"),
    )
    failures_total = counter("Failed transfers by kind of error.", Label("kind"), _TRANSPORT)
    connections = gauge("Connections now, handshakes included.", _TRANSPORT)
    restarts_total = counter(
        "Times that the network library was started anew, because a process of this host died "
        "or stopped while it wrote to this one.",
        _TRANSPORT,
    )
    messages_dropped_total = counter(
        "Messages that were not used: nobody expected them in time, they came late, or they do "
        "not carry the key of their connection.",
        _TRANSPORT,
        Label("cause", tuple(DropCause)),
    )
    handshakes_refused_total = counter(
        "Clients that a listener did not take in, by cause.",
        _TRANSPORT,
        Label("cause", tuple(HandshakeFailure)),
    )
    transport_info = gauge(
        "1 for the transport of the process; rdma is used, idle (there are devices, and rows "
        "do not travel over them) or none.",
        _TRANSPORT,
        Label("rdma", ("used", "idle", "none")),
    )
    floor_bytes_per_second = gauge(
        "Rate below which a peer counts as badly reached; 0 is no floor."
    )


class PoolTable(Table):
    """Buffer pools, read when scraped."""

    prefix = _PREFIX

    buffer_pool_bytes = gauge("Memory of a buffer pool.", _POOL, Label("state", ("in_use", "idle")))
    buffer_pool_limit_bytes = gauge(
        "Most memory that a buffer pool may hold; infinite without a limit.", _POOL
    )
    buffer_pool_allocations_total = counter(
        "Calls of a buffer pool's allocator; constant in a steady state.", _POOL
    )


@dataclass(eq=False)
class _OpenPeer:
    """A peer with connections: how many, and under which label it is shown."""

    label: str
    connections: int = 0


class DataPlaneMetrics:
    """Counts transfers, failures, probes, connections and pools. Thread-safe.

    A peer's labels exist from its first message to the end of its last connection.

    Args:
        registry: where the metrics appear.
        max_peers: peers with labels of their own at a time; further ones share ``other``.
        floor_bytes_per_second: below this rate a peer counts as badly reached; 0 is no floor.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        max_peers: int = 1024,
        *,
        floor_bytes_per_second: float = 0.0,
    ) -> None:
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._open: dict[Peer, _OpenPeer] = {}
        self._traffic: dict[tuple[str, str, str], DataPlaneTable] = {}
        self._moved_bytes = 0
        self._pools: dict[str, BufferPool] = {}
        self._series = DataPlaneTable(registry)
        self._series.floor_bytes_per_second.set(floor_bytes_per_second)
        registry.register(ReadTable(PoolTable, self._read_pools))

    def transport_chosen(self, choice: TransportChoice) -> None:
        """Shows which transport was opened, and whether RDMA devices lie idle."""
        rdma = "used" if choice.rdma else "idle" if choice.obstacles else "none"
        self._series.transport_info.labels(choice.name, rdma).set(1)

    def connection_opened(self, peer: str, transport: str) -> None:
        """Gives ``peer`` its labels."""
        with self._lock:
            known = self._open.get((peer, transport))
            if known is None:
                named = sum(other.label != OTHER_PEERS for other in self._open.values())
                label = peer if named < self._max_peers else OTHER_PEERS
                known = self._open[peer, transport] = _OpenPeer(label)
            known.connections += 1
            self._series.connections.labels(transport).inc()

    def name_peer(self, peer: str, transport: str, name: str) -> None:
        """Shows ``peer``, which is connected, under ``name`` instead of its address: a server id,
        or a job's rank. Call it before the peer's first message."""
        with self._lock:
            known = self._open.get((peer, transport))
            if known is not None and known.label != OTHER_PEERS:
                address, known.label = known.label, name
                self._remove_unused((address, transport))

    def connection_closed(self, peer: str, transport: str) -> None:
        """Removes the labels of ``peer`` with its last connection."""
        with self._lock:
            self._series.connections.labels(transport).dec()
            known = self._open[peer, transport]
            known.connections -= 1
            if known.connections == 0:
                del self._open[peer, transport]
                self._remove_unused((known.label, transport))

    def network_restarted(self, transport: str) -> None:
        """Counts a start anew of the network library."""
        self._series.restarts_total.labels(transport).inc()

    def message_dropped(self, transport: str, cause: DropCause) -> None:
        """Counts a message that was not used."""
        self._series.messages_dropped_total.labels(transport, cause).inc()

    def handshake_refused(self, transport: str, cause: HandshakeFailure) -> None:
        """Counts a client that was not taken in."""
        self._series.handshakes_refused_total.labels(transport, cause).inc()

    def transfer_ended(
        self,
        *,
        kind: Literal["offer", "put"],
        peer: str,
        transport: str,
        nbytes: int,
        seconds: float,
        error: TransportError | None,
    ) -> None:
        """Counts a transfer that is done (``error`` None) or failed."""
        if error is not None:
            self._series.failures_total.labels(type(error).__name__, transport).inc()
            return
        with self._lock:
            series = self._traffic_of(self._label(peer, transport), transport, kind)
            series.transfer_seconds.observe(seconds)
            self._moved_bytes += nbytes
            if kind == "put":
                series.sent_bytes_total.inc(nbytes)
                return
            series.received_bytes_total.inc(nbytes)
            if nbytes >= _LARGE_MESSAGE_BYTES and seconds > 0:
                series.receive_bytes_per_second.set(nbytes / seconds)

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far, of all peers."""
        with self._lock:
            return self._moved_bytes

    def probed(self, result: ProbeResult) -> None:
        """Shows the result of a probe for as long as the peer is connected."""
        with self._lock:
            if (result.peer, result.transport) in self._open:
                label = self._label(result.peer, result.transport)
                rate = self._series.probe_bytes_per_second
                rate.remove_by_labels({"peer": label, "transport": result.transport})
                rate.labels(label, result.transport, result.lanes or "unknown").set(
                    result.gigabytes_per_second * 1e9
                )

    def watch_pool(self, name: str, pool: BufferPool) -> None:
        """Shows the use of ``pool`` under ``name``; a later pool of that name replaces it."""
        self._pools = {**self._pools, name: pool}

    def _label(self, peer: str, transport: str) -> str:
        known = self._open.get((peer, transport))
        return known.label if known is not None else OTHER_PEERS

    def _traffic_of(self, label: str, transport: str, kind: str) -> DataPlaneTable:
        """The series of one label, kept so that a message costs no lookup by labels."""
        series = self._traffic.get((label, transport, kind))
        if series is None:
            series = self._series.at(peer=label, transport=transport, kind=kind)
            self._traffic[label, transport, kind] = series
            # Both directions are shown as soon as there is one.
            series.sent_bytes_total.inc(0)
            series.received_bytes_total.inc(0)
        return series

    def _remove_unused(self, shown: Peer) -> None:
        """Removes the series of a label that no connected peer has any more."""
        label, transport = shown
        if label == OTHER_PEERS or any(
            peer.label == label and key[1] == transport for key, peer in self._open.items()
        ):
            return
        for kind in _DIRECTION.values:
            self._traffic.pop((label, transport, kind), None)
        self._series.forget(peer=label, transport=transport)

    def _read_pools(self) -> Iterator[Reading]:
        for name, pool in self._pools.items():
            stats = pool.stats()
            limit_bytes = float("inf") if pool.limit_bytes is None else pool.limit_bytes
            yield PoolTable.buffer_pool_bytes, (name, "in_use"), stats.in_use_bytes
            yield PoolTable.buffer_pool_bytes, (name, "idle"), stats.idle_bytes
            yield PoolTable.buffer_pool_limit_bytes, (name,), limit_bytes
            yield PoolTable.buffer_pool_allocations_total, (name,), stats.allocations
