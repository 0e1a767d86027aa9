"""A pool server with little memory slows its ranks down and stays within its limit; results are
right, and nothing hangs. Real processes over UCX."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from core_attention.manifest import RankManifest
from tests.support.cluster import NODE_SHAPE, Cluster, Process
from tests.support.team import Team
from tests.support.waiting import eventually

pytestmark = pytest.mark.timeout(300)

N_LAYERS = 3
N_RANKS = 2
DOCUMENTS = (700, 40, 300)
TICK_BYTES = N_RANKS * (917_504 + 655_360)
"""Memory for the messages of one backward tick: of each rank 1040 tokens of 800 bytes there and 512
bytes back, as a pool rounds them."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    running = Cluster(tmp_path)
    yield running
    running.close()


def node_metrics(node: Process) -> dict[str, float]:
    """Values by metric, with the labels that tell series apart."""
    with urllib.request.urlopen(f"http://{node.addresses['metrics']}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return {
        name: float(value)
        for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))
    }


def held_bytes(node: Process) -> float:
    values = node_metrics(node)
    return sum(
        value
        for name, value in values.items()
        if name.startswith("distca_data_plane_buffer_pool_bytes{")
    )


def manifests() -> list[RankManifest]:
    return [RankManifest.from_lengths(0, rank, [list(DOCUMENTS)] * 2) for rank in range(N_RANKS)]


class Watch:
    """Looks at a node's memory until it is ended; the most that it saw."""

    def __init__(self, node: Process) -> None:
        self.most = 0.0
        self._node = node
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(10.0)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, held_bytes(self._node))


@pytest.mark.parametrize(
    ("n_jobs", "interleave"),
    [
        pytest.param(1, True, id="one job"),
        pytest.param(1, False, id="one lane after the other"),
        pytest.param(2, True, id="two jobs"),
    ],
)
def test_ranks_wait_for_memory_and_get_right_results(
    cluster: Cluster, n_jobs: int, interleave: bool
) -> None:
    """Memory for one tick of each lane: reading ahead has to wait."""
    limit = 2 * n_jobs * TICK_BYTES
    node = cluster.start_node("small", buffer_limit_bytes=limit, capacity_rows=10**6)
    teams = [
        Team(
            cluster,
            N_RANKS,
            NODE_SHAPE,
            placement="pool",
            n_layers=N_LAYERS,
            interleave=interleave,
            tick_timeout_seconds=30.0,
        )
        for _ in range(n_jobs)
    ]
    watch = Watch(node)

    def train(team: Team) -> None:
        for seed in range(3):
            team.run(manifests(), seed=seed)
        team.check(manifests(), seed=3)

    try:
        with ThreadPoolExecutor(n_jobs) as threads:
            for future in [threads.submit(train, team) for team in teams]:
                future.result(90)
    finally:
        watch.end()
        for team in teams:
            team.close()
    assert limit / 4 < watch.most <= limit
    in_use = 'distca_data_plane_buffer_pool_bytes{pool="messages",state="in_use"}'
    eventually(lambda: node_metrics(node)[in_use] == 0)
    waited = 'distca_attention_node_memory_wait_seconds_total{server="small"}'
    assert node_metrics(node)[waited] > 0
    log = node.log.read_text()
    assert log.count("overloaded: messages wait at their senders for memory") == 1
    assert "recovers" not in log


def test_tick_that_never_fits_runs_elsewhere_and_the_server_says_what_is_missing(
    cluster: Cluster,
) -> None:
    node = cluster.start_node("tiny", buffer_limit_bytes=2**18, capacity_rows=10**6)
    with Team(cluster, N_RANKS, NODE_SHAPE, placement="pool", n_layers=N_LAYERS) as team:
        team.check(manifests())
    log = node.log.read_text()
    assert "cannot be served by tiny" in log
    assert "the limit is 262144 bytes" in log
    assert "raise --buffer-limit-mib" in log


def test_planner_gives_a_small_server_what_fits(cluster: Cluster) -> None:
    """Without capacity_rows the server derives it from its memory."""
    node = cluster.start_node("small", buffer_limit_bytes=2**20)
    cluster.start_node("large")
    with Team(
        cluster, N_RANKS, NODE_SHAPE, placement="pool", n_layers=N_LAYERS, planner="balanced"
    ) as team:
        team.check(manifests())
    assert "cannot be served" not in node.log.read_text()
