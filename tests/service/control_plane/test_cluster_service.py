"""What there is now, as DescribeCluster tells it over real gRPC."""

from __future__ import annotations

import time

import grpc
import pytest

from distca import __version__
from distca.contract import rpc
from distca.v1 import cluster_pb2, cluster_pb2_grpc, jobs_pb2, membership_pb2
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    Watcher,
    client_of,
    job_spec,
    rank_manifest,
    running,
)


def describe(channel: grpc.Channel) -> cluster_pb2.DescribeClusterResponse:
    stub = cluster_pb2_grpc.ClusterStub(channel)
    answer: cluster_pb2.DescribeClusterResponse = stub.DescribeCluster(
        cluster_pb2.DescribeClusterRequest()
    )
    return answer


def test_servers_come_with_the_load_that_they_reported() -> None:
    load = membership_pb2.ServerLoad(
        queued_tasks=3, open_ticks=2, busy_ratio=0.5, buffer_bytes=7, moved_bytes_per_second=1e9
    )
    with running() as control_plane, client_of(control_plane.address) as client:
        lease = client.register("s1")
        client.membership.Heartbeat(membership_pb2.HeartbeatRequest(lease_id=lease, load=load))
        client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="s1"))
        shown = describe(client.channel)
    assert shown.version == __version__
    assert shown.unix_seconds == pytest.approx(time.time(), abs=10), "the same clock, a call ago"
    assert 0 <= shown.uptime_seconds < 60
    assert not shown.jobs
    (server,) = shown.servers
    assert server.server.server_id == "s1"
    assert server.server.data_address == "127.0.0.1:9000"
    assert server.load == load
    assert server.draining
    assert server.seconds_since_heartbeat < 10


def plan_a_step(client: Client) -> tuple[str, list[str], Watcher]:
    """A job of two ranks whose step 0 is planned, their leases, and what rank 0 is told."""
    opened = [client.open(rank, job_spec("train")) for rank in range(2)]
    job_id, leases = opened[0][0], [lease for _, lease in opened]
    watcher = client.watch_rank(job_id, leases[0])
    watcher.next("job_opened")
    for rank, lease in enumerate(leases):
        client.submit(job_id, lease, rank_manifest(0, rank))
    watcher.next("step_planned")
    return job_id, leases, watcher


def test_a_finished_step_tells_time_tokens_bytes_and_balance() -> None:
    with running() as control_plane, client_of(control_plane.address) as client:
        server_leases = {name: client.register(name) for name in ("s0", "s1")}
        job_id, leases, watcher = plan_a_step(client)
        for name, seconds in (("s0", 1.0), ("s1", 3.0)):
            client.report_server(job_id, server_leases[name], 0, name, seconds)
        client.report_rank(job_id, leases[0], 0, 0)
        (halfway,) = describe(client.channel).jobs
        client.report_rank(job_id, leases[1], 0, 1)
        (job,) = describe(client.channel).jobs
        watcher.cancel()
    assert (halfway.job_id, halfway.name) == (job_id, "train")
    assert (halfway.n_ranks, halfway.n_joined_ranks) == (2, 2)
    assert (halfway.planned_step, halfway.finished_step) == (0, -1)
    assert (halfway.placement, halfway.tolerance) == (jobs_pb2.PLACEMENT_POOL, 0.05)
    assert not halfway.recovering
    assert not halfway.HasField("last_step"), "one rank has not reported yet"
    assert job.finished_step == 0
    step = job.last_step
    assert (step.step, step.step_seconds, step.wait_seconds, step.tokens) == (0, 3.0, 0.25, 200)
    # The test's planner forecasts 2 + 1 bytes in and out for each of two nano-batches, in both
    # phases; the job has 4 layers.
    assert step.moved_bytes == 2 * 2 * (2 + 1) * 2 * 4
    assert [phase.phase for phase in step.phases] == ["forward", "backward"]
    for phase in step.phases:
        assert phase.home_imbalance == 1.0
        assert phase.predicted_imbalance == pytest.approx(2 / 1.5)
        assert phase.measured_imbalance == pytest.approx(1.5)
    # Of two servers in two nano-batches; backward passes are reported with twice the seconds.
    assert [phase.busy_seconds for phase in step.phases] == [
        2 * (1.0 + 3.0) / 2,
        2 * (2.0 + 6.0) / 2,
    ]


@pytest.mark.parametrize(
    ("waited", "longest"), [((0.25, None), 0.25), ((0.0, 0.0), 0.0), ((None, None), None)]
)
def test_waits_are_those_of_the_ranks_that_know_them(
    waited: tuple[float | None, float | None], longest: float | None
) -> None:
    with running() as control_plane, client_of(control_plane.address) as client:
        client.register("s0")
        job_id, leases, watcher = plan_a_step(client)
        for rank, lease in enumerate(leases):
            client.report_rank(job_id, lease, 0, rank, waited=waited[rank])
        (job,) = describe(client.channel).jobs
        watcher.cancel()
        gauge = control_plane.metrics.registry.get_sample_value(
            "distca_control_plane_wait_seconds", {"job_name": job.name}
        )
        answer = client.jobs.GetStep(jobs_pb2.GetStepRequest(job_id=job_id, step=0))
    step = job.last_step
    assert (step.wait_seconds if step.HasField("wait_seconds") else None) == longest
    assert gauge == longest
    told = [r.wait_seconds if r.HasField("wait_seconds") else None for r in answer.ranks]
    assert told == list(waited)


def test_an_in_place_server_comes_with_the_load_that_its_rank_tells() -> None:
    load = membership_pb2.ServerLoad(queued_tasks=3, busy_ratio=0.5, moved_bytes_per_second=1e9)
    with running() as control_plane, client_of(control_plane.address) as client:
        job_id, lease = client.open(0, job_spec(placement=jobs_pb2.PLACEMENT_IN_PLACE, n_ranks=1))
        renewal = jobs_pb2.RenewRankRequest(job_id=job_id, rank_lease_id=lease)
        client.jobs.RenewRank(renewal)
        (silent,) = describe(client.channel).servers
        renewal.in_place_load.CopyFrom(load)
        client.jobs.RenewRank(renewal)
        (told,) = describe(client.channel).servers
        renewal.in_place_load.busy_ratio = 2.0
        with fails(rpc.Reason.INVALID_REQUEST):
            client.jobs.RenewRank(renewal)
    assert silent.load == membership_pb2.ServerLoad()
    assert told.load == load
