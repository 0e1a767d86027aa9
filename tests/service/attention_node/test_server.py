"""The node's process: health, metrics, drain, and what it says when it cannot go on."""

from __future__ import annotations

import itertools
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core_attention.manifest import RankManifest
from distca.contract import rpc
from distca.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, membership_pb2, membership_pb2_grpc
from tests.support.addresses import unused_port
from tests.support.cluster import NODE_SHAPE, Cluster, Process, cluster
from tests.support.errors import fails
from tests.support.team import Team
from tests.support.waiting import eventually

EXIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("node"), 1, lease_seconds=3.0) as started:
        yield started


@pytest.fixture
def doomed(running: Cluster) -> Process:
    """A node to end, beside node-0."""
    return running.start_node(f"doomed-{time.monotonic_ns()}")


def node_metrics(running: Cluster) -> dict[str, float]:
    """Every sample of the node, by name; samples of one name are summed."""
    address = running.processes[1].addresses["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def test_a_node_tells_its_health_and_counts_its_work(running: Cluster) -> None:
    with Team(running, 1, NODE_SHAPE, placement="pool") as team:
        team.check([RankManifest.from_lengths(0, 0, [[10, 20], [30]])])
        measured = wait_for_measurement(team)
        samples = node_metrics(running)
        metrics = running.processes[1].addresses["metrics"]
        with urllib.request.urlopen(f"http://{metrics}/readyz", timeout=5) as answer:
            assert answer.read() == b"serving\n"
    pairs = sum(n * (n + 1) // 2 for n in (10, 20, 30))
    assert samples["distca_attention_node_qk_pairs_total"] == 2 * pairs
    assert samples["distca_attention_node_steps_total"] == 1
    assert samples["distca_attention_node_tasks_total"] >= 2 * 3
    assert samples["distca_attention_node_query_rows_total"] == 2 * 60
    assert samples["distca_attention_node_open_ticks"] == 0
    assert samples["distca_attention_node_queue_depth"] == 0
    # Two nano-batches, forward and backward: four ticks of one rank, each with three parts.
    assert samples["distca_attention_node_tick_seconds_count"] == 3 * 4
    assert samples["distca_attention_node_busy_seconds_total"] == pytest.approx(
        samples["distca_attention_node_kernel_call_seconds_sum"], rel=0.01
    )
    assert samples["distca_attention_node_idle_seconds_total"] > 0
    assert samples["distca_data_plane_received_bytes_total"] > 0
    assert len(measured.forward_busy_seconds) == 2
    assert all(s > 0 for s in (*measured.forward_busy_seconds, *measured.backward_busy_seconds))


def http_status(port: int, path: str) -> int:
    """What the metrics port answers; 0 while nobody does."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0


def test_a_node_that_measures_its_profile_lives_and_does_not_serve_yet(
    running: Cluster, tmp_path: Path
) -> None:
    go_on, metrics = tmp_path / "go-on", unused_port()
    prelude = f"""
import pathlib, time
from attention_node import server
measure = server.load_or_measure
def measure_when_told(*arguments):
    while not pathlib.Path({str(go_on)!r}).exists():
        time.sleep(0.02)
    return measure(*arguments)
server.load_or_measure = measure_when_told
"""
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(
            running.start_node,
            "measuring",
            prelude=prelude,
            metrics_port=metrics,
        )
        try:
            eventually(lambda: http_status(metrics, "/livez") == 200, EXIT_SECONDS)
            assert http_status(metrics, "/readyz") == 503
            assert server_ids(running) == {"node-0"}
        finally:
            go_on.touch()
        node = starting.result(EXIT_SECONDS)
    assert http_status(metrics, "/readyz") == 200
    assert node.terminate(EXIT_SECONDS) == 0


def wait_for_measurement(team: Team) -> jobs_pb2.ServerMeasurement:
    eventually(lambda: bool(team.sessions[0].fetch_step(0).servers))
    return team.sessions[0].fetch_step(0).servers[0]


def server_ids(running: Cluster) -> set[str]:
    with rpc.open_channel(rpc.RpcSettings(address=running.address)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)
        servers = stub.DescribeCluster(cluster_pb2.DescribeClusterRequest()).servers
        return {status.server.server_id for status in servers}


def test_a_node_that_is_told_to_stop_leaves_a_running_job_unharmed(
    running: Cluster, doomed: Process
) -> None:
    lengths = [[90, 20], [30, 80]]
    with Team(running, 1, NODE_SHAPE, placement="pool") as team:

        def run(step: int) -> None:
            # The next step is planned while this one runs, so there is always one to serve.
            team.sessions[0].submit(RankManifest.from_lengths(step + 1, 0, lengths))
            team.run([RankManifest.from_lengths(step, 0, lengths)])

        steps = itertools.count()
        run(next(steps))
        doomed.popen.terminate()
        deadline = time.monotonic() + EXIT_SECONDS
        while doomed.popen.poll() is None:
            assert time.monotonic() < deadline, "the node gets new work all the time"
            run(next(steps))
        assert doomed.popen.returncode == 0
        run(next(steps))


UNSERVED_SECONDS = 1.0
HASTY = f"""
from attention_node import server
server.UNSERVED_SECONDS = {UNSERVED_SECONDS}
"""
"""Of a node that has been without anybody for long after a second."""

MANIFEST = RankManifest.from_lengths(1, 0, [[90, 20], [30, 80]])


def alone_with_a_planned_step(alone: Cluster) -> Team:
    """A rank that has run step 0 and submitted step 1, which is planned; the control plane is
    killed."""
    team = Team(alone, 1, NODE_SHAPE, placement="pool")
    team.run([MANIFEST])
    team.submit([MANIFEST])

    def is_planned() -> bool:
        try:
            team.sessions[0].fetch_step(1)
        except rpc.RpcError as error:
            if error.reason is rpc.Reason.UNKNOWN_STEP:
                return False
            raise
        return True

    eventually(is_planned, EXIT_SECONDS)
    alone.control_plane.kill()
    return team


def test_a_node_without_ranks_and_control_plane_does_not_wait_for_planned_steps(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, 0) as alone:
        node = alone.start_node("node-0", prelude=HASTY)
        alone_with_a_planned_step(alone).close()
        # drain_seconds is 30.
        assert node.terminate(15.0) == 0
        assert "neither a rank nor the control plane has been there" in node.log.read_text()


def test_a_node_without_control_plane_finishes_the_steps_of_ranks_that_are_connected(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, 0) as alone:
        node = alone.start_node("node-0", prelude=HASTY)
        team = alone_with_a_planned_step(alone)
        node.popen.terminate()
        time.sleep(UNSERVED_SECONDS + 0.5)
        for future in team.start_submitted([MANIFEST]):
            future.result(EXIT_SECONDS)
        assert node.popen.wait(EXIT_SECONDS) == 0
        assert "unfinished" not in node.log.read_text()
        team.close()


def test_an_operators_drain_ends_the_node_with_0(running: Cluster, doomed: Process) -> None:
    with rpc.open_channel(rpc.RpcSettings(address=running.address)) as channel:
        stub = membership_pb2_grpc.MembershipStub(channel)
        stub.DrainServer(membership_pb2.DrainServerRequest(server_id=doomed.name))
        assert doomed.popen.wait(EXIT_SECONDS) == 0
        with fails(rpc.Reason.UNKNOWN_SERVER):
            stub.DrainServer(membership_pb2.DrainServerRequest(server_id=doomed.name))


def test_a_node_outlives_its_control_plane_but_not_for_ever(tmp_path: Path) -> None:
    with cluster(tmp_path, 0) as alone:
        patient = alone.start_node("patient")
        hasty = alone.start_node("hasty", control_plane_timeout_seconds=2.0)
        alone.control_plane.kill()
        assert hasty.popen.wait(EXIT_SECONDS) != 0
        assert "PoolLinkLost: the control plane has been away for 2 s" in hasty.log.read_text()
        assert patient.popen.poll() is None
        alone.start_control_plane()
        wait_for_servers(alone, {"patient"})
        assert "fenced" not in patient.log.read_text()


def test_a_node_that_was_stopped_for_longer_than_its_lease_comes_back(running: Cluster) -> None:
    node = running.start_node("sleeper")
    node.popen.send_signal(signal.SIGSTOP)
    wait_for_servers(running, {"node-0"})
    node.popen.send_signal(signal.SIGCONT)
    wait_for_servers(running, {"node-0", "sleeper"})
    assert "fenced, dropping every job" in node.log.read_text()
    assert node.terminate(EXIT_SECONDS) == 0


def wait_for_servers(running: Cluster, expected: set[str]) -> None:
    eventually(lambda: server_ids(running) == expected, EXIT_SECONDS)
