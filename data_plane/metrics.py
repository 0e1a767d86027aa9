"""Prometheus metrics of the data plane.

A process has a peer for each process it talks to, so series of each peer would grow with the
square of the cluster. A process shows sums over its peers, and the slowest few of them by name.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

from prometheus_client import CollectorRegistry

from data_plane.handshake import HandshakeFailure
from distca.metric_table import Label, Reading, ReadTable, Table, counter, gauge, histogram

if TYPE_CHECKING:
    from data_plane.buffer_pool import BufferPool
    from data_plane.transport import ProbeResult, TransportError
    from data_plane.transport_choice import TransportChoice

SLOWEST_PEERS: Final = 3
"""Peers that are shown by name: those whose rates are lowest."""

_STAYS: Final = 1.25
"""A peer that is shown goes on being shown until its rate is this much above those of the slowest.
Peers of nearly equal rates would take turns otherwise, each a new series for Prometheus."""

_LARGE_MESSAGE_BYTES = 2**18
_NEWEST: Final = 1 / 16
"""Weight of the newest message in a peer's mean rate."""

Peer = tuple[str, str]
"""A peer, by address or by label, and the transport that reaches it."""


class DropCause(StrEnum):
    """The reasons why a message that came was not used."""

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
_LANES = Label("lanes")
_DIRECTION = Label("kind", ("offer", "put"))
_POOL = Label("pool")


class DataPlaneTable(Table):
    """Transfers, connections and what was not used."""

    prefix = _PREFIX

    sent_bytes_total = counter("Bytes of messages handed to the network.", _TRANSPORT)
    received_bytes_total = counter("Bytes of messages received.", _TRANSPORT)
    transfer_seconds = histogram(
        "Seconds of a finished transfer: a put since it was asked for and its bytes were written, "
        "an offer since its message arrived.",
        _DIRECTION,
        _TRANSPORT,
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


class SlowestTable(Table):
    """The peers that are reached worst, chosen when scraped."""

    prefix = _PREFIX

    receive_bytes_per_second = gauge(
        "Mean rate of received messages of 256 KiB or more, each from its arrival on, of the "
        f"{SLOWEST_PEERS} slowest peers.",
        _PEER,
        _TRANSPORT,
    )
    probe_bytes_per_second = gauge(
        f"Result of the last bandwidth probe of the {SLOWEST_PEERS} slowest peers; lanes are the "
        "network paths that UCX chose.",
        _PEER,
        _TRANSPORT,
        _LANES,
    )
    slow_peers = gauge(
        "Peers whose last bandwidth probe, or mean rate without one, is below the floor."
    )


@dataclass(eq=False)
class _OpenPeer:
    """A peer with connections: how many, under which label it is shown, and what is known of it.

    Attributes:
        label: its name, or its address until it has one.
        transport: that reaches it.
        connections: to it now.
        receive_rate: mean rate of large messages in bytes per second; None before the first.
        probe_rate: of its last probe, likewise.
        lanes: of that probe.
    """

    label: str
    transport: str
    connections: int = 0
    receive_rate: float | None = None
    probe_rate: float | None = None
    lanes: str = ""

    def received_at(self, rate: float) -> None:
        """A large message came at ``rate`` bytes per second."""
        before = rate if self.receive_rate is None else self.receive_rate
        self.receive_rate = before + _NEWEST * (rate - before)


class DataPlaneMetrics:
    """Counts transfers, failures, probes, connections and pools. Thread-safe.

    A peer is known from its first connection to the end of its last.

    Args:
        registry: where the metrics appear.
        floor_bytes_per_second: below this rate a peer counts as badly reached; 0 is no floor.

    Attributes:
        series: for what one count says.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        floor_bytes_per_second: float = 0.0,
    ) -> None:
        self._floor = floor_bytes_per_second
        self._lock = threading.Lock()
        self._open: dict[Peer, _OpenPeer] = {}
        self._traffic: dict[tuple[str, str], DataPlaneTable] = {}
        self._moved_bytes = 0
        self._pools: dict[str, BufferPool] = {}
        self._slowest = _Slowest()
        self._slowest_probed = _Slowest()
        self.series = DataPlaneTable(registry)
        self.series.floor_bytes_per_second.set(floor_bytes_per_second)
        registry.register(ReadTable(PoolTable, self._read_pools))
        registry.register(ReadTable(SlowestTable, self._read_slowest))

    def transport_chosen(self, choice: TransportChoice) -> None:
        """Shows which transport was opened, and whether RDMA devices lie idle."""
        rdma = "used" if choice.rdma else "idle" if choice.obstacles else "none"
        self.series.transport_info.labels(choice.name, rdma).set(1)
        # From the start: what begins with its first event has not increased by it.
        for cause in DropCause:
            self.series.messages_dropped_total.labels(choice.name, cause)
        for failure in HandshakeFailure:
            self.series.handshakes_refused_total.labels(choice.name, failure)

    def connection_opened(self, peer: str, transport: str) -> None:
        """A connection to ``peer`` begins."""
        with self._lock:
            known = self._open.get((peer, transport))
            if known is None:
                known = self._open[peer, transport] = _OpenPeer(peer, transport)
            known.connections += 1
            self.series.connections.labels(transport).inc()

    def name_peer(self, peer: str, transport: str, name: str) -> None:
        """Shows ``peer``, which is connected, under ``name`` instead of its address: a server id,
        or a job's rank."""
        with self._lock:
            known = self._open.get((peer, transport))
            if known is not None:
                known.label = name

    def connection_closed(self, peer: str, transport: str) -> None:
        """A connection to ``peer`` has ended; with its last the peer is forgotten."""
        with self._lock:
            self.series.connections.labels(transport).dec()
            known = self._open[peer, transport]
            known.connections -= 1
            if known.connections == 0:
                del self._open[peer, transport]

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
            self.series.failures_total.labels(type(error).__name__, transport).inc()
            return
        with self._lock:
            series = self._traffic_of(transport, kind)
            series.transfer_seconds.observe(seconds)
            self._moved_bytes += nbytes
            if kind == "put":
                series.sent_bytes_total.inc(nbytes)
                return
            series.received_bytes_total.inc(nbytes)
            known = self._open.get((peer, transport))
            if known is not None and nbytes >= _LARGE_MESSAGE_BYTES and seconds > 0:
                known.received_at(nbytes / seconds)

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received so far, of all peers."""
        with self._lock:
            return self._moved_bytes

    def probed(self, result: ProbeResult) -> None:
        """Keeps the result of a probe for as long as the peer is connected."""
        with self._lock:
            known = self._open.get((result.peer, result.transport))
            if known is not None:
                known.probe_rate = result.gigabytes_per_second * 1e9
                known.lanes = result.lanes or "unknown"

    def watch_pool(self, name: str, pool: BufferPool) -> None:
        """Shows the use of ``pool`` under ``name``; a later pool of that name replaces it."""
        self._pools = {**self._pools, name: pool}

    def _traffic_of(self, transport: str, kind: str) -> DataPlaneTable:
        """The series of one transport, kept so that a message costs no lookup by labels."""
        series = self._traffic.get((transport, kind))
        if series is None:
            series = self.series.at(transport=transport, kind=kind)
            self._traffic[transport, kind] = series
            # Both directions are shown as soon as there is one.
            series.sent_bytes_total.inc(0)
            series.received_bytes_total.inc(0)
        return series

    def _peers(self) -> dict[Peer, _OpenPeer]:
        """The peers by their labels, those that share one taken together."""
        peers: dict[Peer, _OpenPeer] = {}
        for one in self._open.values():
            same = peers.get((one.label, one.transport))
            peers[one.label, one.transport] = one if same is None else _together(same, one)
        return peers

    def _read_slowest(self) -> Iterable[Reading]:
        with self._lock:
            peers = self._peers()
            received = self._slowest.of(peers, lambda peer: peer.receive_rate)
            probed = self._slowest_probed.of(peers, lambda peer: peer.probe_rate)
            slow = sum(_rate(peer) < self._floor for peer in peers.values())
        readings: list[Reading] = [(SlowestTable.slow_peers, (), slow)]
        for key, rate in received.items():
            readings.append((SlowestTable.receive_bytes_per_second, key, rate))
        for key, rate in probed.items():
            labels = (*key, peers[key].lanes)
            readings.append((SlowestTable.probe_bytes_per_second, labels, rate))
        return readings

    def _read_pools(self) -> Iterator[Reading]:
        for name, pool in self._pools.items():
            stats = pool.stats()
            limit_bytes = float("inf") if pool.limit_bytes is None else pool.limit_bytes
            yield PoolTable.buffer_pool_bytes, (name, "in_use"), stats.in_use_bytes
            yield PoolTable.buffer_pool_bytes, (name, "idle"), stats.idle_bytes
            yield PoolTable.buffer_pool_limit_bytes, (name,), limit_bytes
            yield PoolTable.buffer_pool_allocations_total, (name,), stats.allocations


class _Slowest:
    """Chooses the slowest peers, and stays with its choice while those are nearly the slowest."""

    def __init__(self) -> None:
        self._chosen: frozenset[Peer] = frozenset()

    def of(
        self, peers: Mapping[Peer, _OpenPeer], rate_of: Callable[[_OpenPeer], float | None]
    ) -> dict[Peer, float]:
        """The rates of :data:`SLOWEST_PEERS` of ``peers``, fewer if fewer have one."""
        rates = {key: rate for key, peer in peers.items() if (rate := rate_of(peer)) is not None}

        def rank(key: Peer) -> float:
            return rates[key] / _STAYS if key in self._chosen else rates[key]

        chosen = heapq.nsmallest(SLOWEST_PEERS, rates, key=rank)
        self._chosen = frozenset(chosen)
        return {key: rates[key] for key in chosen}


def _together(one: _OpenPeer, other: _OpenPeer) -> _OpenPeer:
    """Two connections' peers that have one label: the slower rates count."""
    probed = min((one, other), key=_probe_rate)
    received = [rate for rate in (one.receive_rate, other.receive_rate) if rate is not None]
    return _OpenPeer(
        one.label,
        one.transport,
        one.connections + other.connections,
        min(received, default=None),
        probed.probe_rate,
        probed.lanes,
    )


def _probe_rate(peer: _OpenPeer) -> float:
    return math.inf if peer.probe_rate is None else peer.probe_rate


def _rate(peer: _OpenPeer) -> float:
    """The rate by which a peer is held to the floor; infinite if nothing was measured."""
    if peer.probe_rate is not None:
        return peer.probe_rate
    return math.inf if peer.receive_rate is None else peer.receive_rate
