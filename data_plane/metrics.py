"""Prometheus metrics of the data plane. Scraping only reads."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from data_plane.buffer_pool import BufferPool
    from data_plane.transport import ProbeResult, TransportError
    from data_plane.transport_choice import TransportChoice

OTHER_PEERS = "other"
"""Label of the peers beyond ``max_peers``."""

_PREFIX = "distca_data_plane"
_PEER_LABELS = ("peer", "transport")
_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LARGE_MESSAGE_BYTES = 2**18

Peer = tuple[str, str]
"""A peer, by address or by label, and the transport that reaches it."""


@dataclass(eq=False)
class _OpenPeer:
    """A peer with connections: how many, and under which label it is shown."""

    label: str
    connections: int = 0


@dataclass(frozen=True, eq=False)
class _Traffic:
    """The series of one label, kept so that a message costs no lookup by label."""

    sent_bytes: Counter
    received_bytes: Counter


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
        self._traffic: dict[Peer, _Traffic] = {}
        self._seconds: dict[tuple[str, str], Histogram] = {}
        self._moved_bytes = 0
        self._sent_bytes = Counter(
            f"{_PREFIX}_sent_bytes_total",
            "Bytes of messages handed to the network.",
            _PEER_LABELS,
            registry=registry,
        )
        self._received_bytes = Counter(
            f"{_PREFIX}_received_bytes_total",
            "Bytes of messages received.",
            _PEER_LABELS,
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            f"{_PREFIX}_transfer_seconds",
            "Seconds of a finished transfer: a put since it was asked for, an offer since its "
            "message arrived.",
            ("kind", "transport"),
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._receive_rate = Gauge(
            f"{_PREFIX}_receive_bytes_per_second",
            "Rate of the last received message of 256 KiB or more, from its arrival on.",
            _PEER_LABELS,
            registry=registry,
        )
        self._probe_rate = Gauge(
            f"{_PREFIX}_probe_bytes_per_second",
            "Result of the last bandwidth probe; lanes are the network paths that UCX chose.",
            (*_PEER_LABELS, "lanes"),
            registry=registry,
        )
        self._failures = Counter(
            f"{_PREFIX}_failures_total",
            "Failed transfers by kind of error.",
            ("kind", "transport"),
            registry=registry,
        )
        self._connections = Gauge(
            f"{_PREFIX}_connections",
            "Connections now, handshakes included.",
            ("transport",),
            registry=registry,
        )
        self._restarts = Counter(
            f"{_PREFIX}_restarts_total",
            "Times that the network library was started anew, because a process of this host died "
            "or stopped while it wrote to this one.",
            ("transport",),
            registry=registry,
        )
        self._transport = Gauge(
            f"{_PREFIX}_transport_info",
            "1 for the transport of the process; rdma is used, idle (there are devices, and rows "
            "do not travel over them) or none.",
            ("transport", "rdma"),
            registry=registry,
        )
        Gauge(
            f"{_PREFIX}_floor_bytes_per_second",
            "Rate below which a peer counts as badly reached; 0 is no floor.",
            registry=registry,
        ).set(floor_bytes_per_second)
        self._pools = _PoolCollector()
        registry.register(self._pools)

    def transport_chosen(self, choice: TransportChoice) -> None:
        """Shows which transport was opened, and whether RDMA devices lie idle."""
        rdma = "used" if choice.rdma else "idle" if choice.obstacles else "none"
        self._transport.labels(choice.name, rdma).set(1)

    def connection_opened(self, peer: str, transport: str) -> None:
        """Gives ``peer`` its labels."""
        with self._lock:
            known = self._open.get((peer, transport))
            if known is None:
                named = sum(other.label != OTHER_PEERS for other in self._open.values())
                label = peer if named < self._max_peers else OTHER_PEERS
                known = self._open[peer, transport] = _OpenPeer(label)
            known.connections += 1
            self._connections.labels(transport).inc()

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
            self._connections.labels(transport).dec()
            known = self._open[peer, transport]
            known.connections -= 1
            if known.connections == 0:
                del self._open[peer, transport]
                self._remove_unused((known.label, transport))

    def network_restarted(self, transport: str) -> None:
        """Counts a start anew of the network library."""
        self._restarts.labels(transport).inc()

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
            self._failures.labels(type(error).__name__, transport).inc()
            return
        with self._lock:
            label = self._label(peer, transport)
            traffic = self._traffic_of(label, transport)
            self._seconds_of(kind, transport).observe(seconds)
            self._moved_bytes += nbytes
            if kind == "put":
                traffic.sent_bytes.inc(nbytes)
                return
            traffic.received_bytes.inc(nbytes)
            if nbytes >= _LARGE_MESSAGE_BYTES and seconds > 0:
                self._receive_rate.labels(label, transport).set(nbytes / seconds)

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
                self._probe_rate.remove_by_labels({"peer": label, "transport": result.transport})
                self._probe_rate.labels(label, result.transport, result.lanes or "unknown").set(
                    result.gigabytes_per_second * 1e9
                )

    def watch_pool(self, name: str, pool: BufferPool) -> None:
        """Shows the use of ``pool`` under ``name``; a later pool of that name replaces it."""
        self._pools.add(name, pool)

    def _label(self, peer: str, transport: str) -> str:
        known = self._open.get((peer, transport))
        return known.label if known is not None else OTHER_PEERS

    def _traffic_of(self, label: str, transport: str) -> _Traffic:
        traffic = self._traffic.get((label, transport))
        if traffic is None:
            traffic = self._traffic[label, transport] = _Traffic(
                self._sent_bytes.labels(label, transport),
                self._received_bytes.labels(label, transport),
            )
        return traffic

    def _seconds_of(self, kind: str, transport: str) -> Histogram:
        seconds = self._seconds.get((kind, transport))
        if seconds is None:
            seconds = self._seconds[kind, transport] = self._transfer_seconds.labels(
                kind, transport
            )
        return seconds

    def _remove_unused(self, shown: Peer) -> None:
        """Removes the series of a label that no connected peer has any more."""
        label, transport = shown
        if label == OTHER_PEERS or any(
            peer.label == label and key[1] == transport for key, peer in self._open.items()
        ):
            return
        self._traffic.pop(shown, None)
        for metric in (
            self._sent_bytes,
            self._received_bytes,
            self._receive_rate,
            self._probe_rate,
        ):
            metric.remove_by_labels({"peer": label, "transport": transport})


class _PoolCollector(Collector):
    """Reads the pools when scraped."""

    def __init__(self) -> None:
        self._pools: dict[str, BufferPool] = {}

    def add(self, name: str, pool: BufferPool) -> None:
        self._pools = {**self._pools, name: pool}

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            f"{_PREFIX}_buffer_pool_bytes",
            "Memory of a buffer pool.",
            labels=("pool", "state"),
        )
        limit = GaugeMetricFamily(
            f"{_PREFIX}_buffer_pool_limit_bytes",
            "Most memory that a buffer pool may hold; infinite without a limit.",
            labels=("pool",),
        )
        allocations = CounterMetricFamily(
            f"{_PREFIX}_buffer_pool_allocations_total",
            "Calls of a buffer pool's allocator; constant in a steady state.",
            labels=("pool",),
        )
        for name, pool in self._pools.items():
            stats = pool.stats()
            held.add_metric((name, "in_use"), stats.in_use_bytes)
            held.add_metric((name, "idle"), stats.idle_bytes)
            limit.add_metric(
                (name,), float("inf") if pool.limit_bytes is None else pool.limit_bytes
            )
            allocations.add_metric((name,), stats.allocations)
        return (held, limit, allocations)
