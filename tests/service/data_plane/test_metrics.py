"""The data plane's metrics: the values that they count, and when labels go."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from data_plane.buffer_pool import BufferPool
from data_plane.metrics import DataPlaneMetrics
from data_plane.transport import Address, PeerLost, ProbeResult
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.secret import SECRET, proven
from tests.support.waiting import eventually

PEER = {"peer": "a:1", "transport": "ucxx"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> DataPlaneMetrics:
    return DataPlaneMetrics(registry)


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"distca_data_plane_{name}", labels)


def send(metrics: DataPlaneMetrics, peer: str, nbytes: int) -> None:
    metrics.transfer_ended(
        kind="put", peer=peer, transport="ucxx", nbytes=nbytes, seconds=0.1, error=None
    )


def test_bytes_are_counted_by_direction_and_failures_by_kind(
    registry: CollectorRegistry, metrics: DataPlaneMetrics
) -> None:
    metrics.connection_opened("a:1", "ucxx")
    send(metrics, "a:1", 100)
    metrics.transfer_ended(
        kind="offer", peer="a:1", transport="ucxx", nbytes=2**21, seconds=0.5, error=None
    )
    assert value(registry, "sent_bytes_total", transport="ucxx") == 100
    assert value(registry, "received_bytes_total", transport="ucxx") == 2**21
    assert value(registry, "receive_bytes_per_second", **PEER) == 2**22
    assert value(registry, "transfer_seconds_count", kind="put", transport="ucxx") == 1
    error = PeerLost("gone", transport="ucxx", peer="a:1")
    metrics.transfer_ended(
        kind="put", peer="a:1", transport="ucxx", nbytes=1, seconds=0.1, error=error
    )
    assert value(registry, "failures_total", kind="PeerLost", transport="ucxx") == 1
    assert value(registry, "sent_bytes_total", transport="ucxx") == 100


def test_a_peer_goes_with_the_last_connection(
    registry: CollectorRegistry, metrics: DataPlaneMetrics
) -> None:
    for _ in range(2):
        metrics.connection_opened("a:1", "ucxx")
    metrics.probed(ProbeResult("a:1", "ucxx", "tcp", 1000, 1.5, 1e-4))
    metrics.connection_closed("a:1", "ucxx")
    assert shown_peers(registry, "probe_bytes_per_second") == {"a:1"}
    metrics.connection_closed("a:1", "ucxx")
    assert shown_peers(registry, "probe_bytes_per_second") == set()


def test_a_named_peer_is_shown_by_its_name_and_of_connections_of_one_name_the_slower(
    registry: CollectorRegistry, metrics: DataPlaneMetrics
) -> None:
    for address, rate in (("a:1", 1.0), ("a:2", 2.0)):
        metrics.connection_opened(address, "ucxx")
        metrics.name_peer(address, "ucxx", "train.rank-0")
        metrics.probed(ProbeResult(address, "ucxx", "tcp", 1000, rate, 1e-4))
    named = {"peer": "train.rank-0", "transport": "ucxx", "lanes": "tcp"}
    assert shown_peers(registry, "probe_bytes_per_second") == {"train.rank-0"}
    assert value(registry, "probe_bytes_per_second", **named) == 1e9
    metrics.connection_closed("a:1", "ucxx")
    assert value(registry, "probe_bytes_per_second", **named) == 2e9


def test_a_second_probe_over_other_lanes_replaces_the_first(
    registry: CollectorRegistry, metrics: DataPlaneMetrics
) -> None:
    metrics.connection_opened("a:1", "ucxx")
    for lanes in ("tcp", "cuda_ipc"):
        metrics.probed(ProbeResult("a:1", "ucxx", lanes, 1000, 1.5, 1e-4))
    assert value(registry, "probe_bytes_per_second", **PEER, lanes="tcp") is None
    assert value(registry, "probe_bytes_per_second", **PEER, lanes="cuda_ipc") == 1.5e9


def shown_peers(registry: CollectorRegistry, name: str) -> set[str]:
    return {
        sample.labels["peer"]
        for family in registry.collect()
        for sample in family.samples
        if sample.name == f"distca_data_plane_{name}"
    }


def test_the_slowest_peers_are_shown_and_the_number_of_those_below_the_floor(
    registry: CollectorRegistry,
) -> None:
    metrics = DataPlaneMetrics(registry, floor_bytes_per_second=4.5e9)
    for number in range(10):
        metrics.connection_opened(f"peer{number}", "ucxx")
        metrics.probed(ProbeResult(f"peer{number}", "ucxx", "tcp", 1000, float(10 - number), 1e-4))
    assert shown_peers(registry, "probe_bytes_per_second") == {"peer7", "peer8", "peer9"}
    assert value(registry, "slow_peers") == 4


def test_what_is_shown_does_not_change_with_every_message(
    registry: CollectorRegistry, metrics: DataPlaneMetrics
) -> None:
    """Peers of nearly one rate do not take turns: each turn is a series more for Prometheus."""

    def receive(peer: str, seconds: float) -> None:
        metrics.transfer_ended(
            kind="offer", peer=peer, transport="ucxx", nbytes=2**20, seconds=seconds, error=None
        )

    peers = [f"peer{number}" for number in range(6)]
    for peer in peers:
        metrics.connection_opened(peer, "ucxx")
        receive(peer, 0.1)
    shown = shown_peers(registry, "receive_bytes_per_second")
    assert len(shown) == 3
    for _ in range(20):
        for peer in peers:
            receive(peer, 0.1 if peer in shown else 0.11)
    assert shown_peers(registry, "receive_bytes_per_second") == shown
    slow = next(peer for peer in peers if peer not in shown)
    for _ in range(100):
        receive(slow, 1.0)
    assert slow in shown_peers(registry, "receive_bytes_per_second")


def test_a_process_has_as_many_series_with_a_thousand_peers_as_with_ten() -> None:
    def series(n_peers: int) -> int:
        registry = CollectorRegistry()
        metrics = DataPlaneMetrics(registry)
        for number in range(n_peers):
            peer = f"peer{number}"
            metrics.connection_opened(peer, "ucxx")
            metrics.probed(ProbeResult(peer, "ucxx", "tcp", 1000, 1.0, 1e-4))
            for kind in ("put", "offer"):
                metrics.transfer_ended(
                    kind=kind, peer=peer, transport="ucxx", nbytes=2**20, seconds=0.1, error=None
                )
        return len(generate_latest(registry).splitlines())

    assert series(1000) == series(10)


def test_the_floor_and_a_pools_limit_are_shown(registry: CollectorRegistry) -> None:
    metrics = DataPlaneMetrics(registry, floor_bytes_per_second=2e9)
    metrics.watch_pool("host", BufferPool(limit_bytes=4096))
    metrics.watch_pool("free", BufferPool())
    assert value(registry, "floor_bytes_per_second") == 2e9
    assert value(registry, "buffer_pool_limit_bytes", pool="host") == 4096
    assert value(registry, "buffer_pool_limit_bytes", pool="free") == float("inf")


def test_scraping_changes_nothing(registry: CollectorRegistry, metrics: DataPlaneMetrics) -> None:
    pool = BufferPool()
    metrics.watch_pool("host", pool)
    buffer = pool.acquire(1000)
    assert generate_latest(registry) == generate_latest(registry)
    assert value(registry, "buffer_pool_bytes", pool="host", state="in_use") == 1024
    buffer.release()
    assert value(registry, "buffer_pool_bytes", pool="host", state="idle") == 1024
    assert value(registry, "buffer_pool_allocations_total", pool="host") == 1


@pytest.fixture
def transport(metrics: DataPlaneMetrics) -> Iterator[UcxxTransport]:
    transport = UcxxTransport(metrics=metrics)
    yield transport
    transport.close()


def test_a_transport_reports(registry: CollectorRegistry, transport: UcxxTransport) -> None:
    address: Address = transport.listen("127.0.0.1", 0, proven())
    peer = UcxxTransport()
    try:
        connection, _ = peer.connect(address, b"", 5.0, secret=SECRET)
        assert value(registry, "connections", transport="ucxx") == 1
        own, _ = transport.connect(address, b"", 5.0, secret=SECRET)
        own.put(1, BufferPool().acquire(300), 5.0).wait(5.0)
        labels = {"peer": str(address), "transport": "ucxx"}
        assert value(registry, "sent_bytes_total", transport="ucxx") == 300
        result = transport.probe(own, 1000, 2, 5.0)
        shown = value(registry, "probe_bytes_per_second", **labels, lanes=result.lanes)
        assert shown == result.gigabytes_per_second * 1e9
        connection.close()
        own.close()
        eventually(lambda: value(registry, "connections", transport="ucxx") == 0)
        assert (value(registry, "sent_bytes_total", transport="ucxx") or 0) >= 300
    finally:
        peer.close()
