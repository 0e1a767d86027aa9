"""Prometheus metrics of the data plane. Scraping only reads."""

from __future__ import annotations

import threading
from collections import Counter as Tally
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from data_plane.buffer_pool import BufferPool
    from data_plane.transport import ProbeResult, TransportError

OTHER_PEERS = "other"
"""Label of the peers beyond ``max_peers``."""

_PEER_LABELS = ("peer", "transport")
_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_LARGE_MESSAGE_BYTES = 2**20


class DataPlaneMetrics:
    """Counts transfers, failures, probes, connections and pools. Thread-safe.

    A peer's labels exist from its first connection to its last.

    Args:
        registry: where the metrics appear.
        max_peers: peers with labels of their own at a time; further ones share ``other``.
    """

    def __init__(self, registry: CollectorRegistry, max_peers: int = 1024) -> None:
        self._max_peers = max_peers
        self._lock = threading.Lock()
        self._open_connections: Tally[tuple[str, str]] = Tally()
        self._labelled: set[tuple[str, str]] = set()
        self._sent_bytes = Counter(
            "distca_data_plane_sent_bytes_total",
            "Bytes of messages handed to the network.",
            _PEER_LABELS,
            registry=registry,
        )
        self._received_bytes = Counter(
            "distca_data_plane_received_bytes_total",
            "Bytes of messages received.",
            _PEER_LABELS,
            registry=registry,
        )
        self._transfer_seconds = Histogram(
            "distca_data_plane_transfer_seconds",
            "Seconds of a finished transfer: a put since it was asked for, an offer since its "
            "message arrived.",
            ("kind", "transport"),
            buckets=_SECONDS_BUCKETS,
            registry=registry,
        )
        self._receive_rate = Gauge(
            "distca_data_plane_receive_bytes_per_second",
            "Rate of the last received message of 1 MiB or more, from its arrival on.",
            _PEER_LABELS,
            registry=registry,
        )
        self._probe_rate = Gauge(
            "distca_data_plane_probe_gigabytes_per_second",
            "Result of the last bandwidth probe, 1e9 bytes per second.",
            _PEER_LABELS,
            registry=registry,
        )
        self._failures = Counter(
            "distca_data_plane_failures_total",
            "Failed transfers by kind of error.",
            ("kind", "transport"),
            registry=registry,
        )
        self._connections = Gauge(
            "distca_data_plane_connections",
            "Connections now, handshakes included.",
            ("transport",),
            registry=registry,
        )
        self._pools = _PoolCollector()
        registry.register(self._pools)

    def connection_opened(self, peer: str, transport: str) -> None:
        """Gives ``peer`` its labels."""
        with self._lock:
            self._open_connections[peer, transport] += 1
            if len(self._labelled) < self._max_peers:
                self._labelled.add((peer, transport))
            self._connections.labels(transport).inc()

    def connection_closed(self, peer: str, transport: str) -> None:
        """Removes the labels of ``peer`` with its last connection."""
        with self._lock:
            self._connections.labels(transport).dec()
            self._open_connections[peer, transport] -= 1
            if self._open_connections[peer, transport] > 0:
                return
            del self._open_connections[peer, transport]
            self._labelled.discard((peer, transport))
            by_peer = (self._sent_bytes, self._received_bytes, self._receive_rate, self._probe_rate)
            for metric in by_peer:
                metric.remove_by_labels({"peer": peer, "transport": transport})

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
        self._transfer_seconds.labels(kind, transport).observe(seconds)
        with self._lock:
            label = self._label(peer, transport)
            if kind == "put":
                self._sent_bytes.labels(label, transport).inc(nbytes)
                return
            self._received_bytes.labels(label, transport).inc(nbytes)
            if nbytes >= _LARGE_MESSAGE_BYTES and seconds > 0:
                self._receive_rate.labels(label, transport).set(nbytes / seconds)

    def probed(self, result: ProbeResult) -> None:
        """Shows the result of a probe for as long as the peer is connected."""
        with self._lock:
            if (result.peer, result.transport) in self._open_connections:
                label = self._label(result.peer, result.transport)
                self._probe_rate.labels(label, result.transport).set(result.gigabytes_per_second)

    def watch_pool(self, name: str, pool: BufferPool) -> None:
        """Shows the use of ``pool`` under ``name``; a later pool of that name replaces it."""
        self._pools.add(name, pool)

    def _label(self, peer: str, transport: str) -> str:
        """The label for ``peer``: its name while it is among the first ``max_peers``."""
        return peer if (peer, transport) in self._labelled else OTHER_PEERS


class _PoolCollector(Collector):
    """Reads the pools when scraped."""

    def __init__(self) -> None:
        self._pools: dict[str, BufferPool] = {}

    def add(self, name: str, pool: BufferPool) -> None:
        self._pools = {**self._pools, name: pool}

    def collect(self) -> Iterable[Metric]:
        held = GaugeMetricFamily(
            "distca_data_plane_buffer_pool_bytes",
            "Memory of a buffer pool.",
            labels=("pool", "state"),
        )
        allocations = CounterMetricFamily(
            "distca_data_plane_buffer_pool_allocations_total",
            "Calls of a buffer pool's allocator; constant in a steady state.",
            labels=("pool",),
        )
        for name, pool in self._pools.items():
            stats = pool.stats()
            held.add_metric((name, "in_use"), stats.in_use_bytes)
            held.add_metric((name, "idle"), stats.idle_bytes)
            allocations.add_metric((name,), stats.allocations)
        return (held, allocations)
