"""Members that fall silent, by a clock that the tests set forward."""

from __future__ import annotations

from control_plane.jobs.isolation import IsolationDetector
from distca.contract import rpc
from distca.v1 import cluster_pb2, jobs_pb2
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    job_spec,
    rank_manifest,
)

LEASE_SECONDS = 30.0
"""As in the harness."""


def renew(client: Client, job_id: str, lease: str) -> None:
    request = jobs_pb2.RenewRankRequest(job_id=job_id, rank_lease_id=lease)
    assert client.jobs.RenewRank(request).lease_seconds == LEASE_SECONDS


def n_servers(client: Client) -> int:
    return len(client.cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest()).servers)


def test_silent_server_leaves_and_may_register_again_under_its_id(
    control_plane: TimedControlPlane, client: Client
) -> None:
    lease = client.register("s0")
    stream = client.watch_server(lease)
    control_plane.pass_time(LEASE_SECONDS - 1.0)
    assert n_servers(client) == 1
    control_plane.pass_time(2.0)
    assert n_servers(client) == 0
    error = stream.end()
    assert error is not None
    assert error.reason is rpc.Reason.FENCED
    with fails(rpc.Reason.FENCED):
        client.heartbeat(lease)
    newer = client.register("s0")
    assert newer != lease
    client.heartbeat(newer)


def test_jobs_whose_unfinished_plans_name_a_silent_server_recover(
    control_plane: TimedControlPlane, client: Client
) -> None:
    client.register("s0")
    leases = {}
    for name in ("busy", "done"):
        spec = job_spec(name, n_ranks=1)
        job_id, lease = client.open(0, spec)
        leases[name] = (job_id, lease, client.watch_rank(job_id, lease))
        leases[name][2].next("job_opened")
        client.submit(job_id, lease, rank_manifest(7, 0))
        leases[name][2].next("step_planned")
    client.report_rank(*leases["done"][:2], 7, 0)
    for _ in range(4):
        control_plane.pass_time(LEASE_SECONDS / 3)
        for job_id, lease, _ in leases.values():
            renew(client, job_id, lease)
    assert n_servers(client) == 0
    recover = leases["busy"][2].next("recover")
    assert recover.reason == "server s0 lost its lease while serving step 7"
    assert recover.lost_server_ids == ["s0"]
    leases["done"][2].next("step_finished")
    assert leases["done"][2].is_quiet()
    registry = control_plane.metrics.registry
    expired = registry.get_sample_value(
        "distca_control_plane_lease_expirations_total", {"kind": "server"}
    )
    assert expired == 1
    assert registry.get_sample_value("distca_control_plane_servers_fenced_total") == 1


def test_silent_rank_closes_the_job_and_takes_its_server_with_it(
    control_plane: TimedControlPlane, client: Client
) -> None:
    spec = job_spec(placement=jobs_pb2.PLACEMENT_IN_PLACE)
    (job_id, silent), (_, alive) = client.open(0, spec), client.open(1, spec)
    watcher = client.watch_rank(job_id, alive)
    watcher.next("job_opened")
    for _ in range(3):
        renew(client, job_id, alive)
        control_plane.pass_time(LEASE_SECONDS / 2.9)
    error = watcher.next("job_closed").error
    assert "rank 0 on host-0" in error
    assert "host-1" not in error
    assert n_servers(client) == 0
    with fails(rpc.Reason.UNKNOWN_JOB):
        renew(client, job_id, silent)
    assert client.open(0, spec)[0] != job_id


def test_heartbeat_of_an_in_place_server_renews_its_rank(
    control_plane: TimedControlPlane, client: Client
) -> None:
    spec = job_spec(n_ranks=1, placement=jobs_pb2.PLACEMENT_IN_PLACE)
    job_id, lease = client.open(0, spec)
    watcher = client.watch_rank(job_id, lease)
    watcher.next("job_opened")
    for _ in range(3):
        client.heartbeat(lease)
        control_plane.pass_time(0.9 * LEASE_SECONDS)
    assert watcher.is_quiet()
    renew(client, job_id, lease)


def test_silence_of_several_is_deafness_and_of_one_is_its_end() -> None:
    detector = IsolationDetector(lease_seconds=10.0, now=100.0)
    assert not detector.is_isolated(3, now=105.0)
    assert detector.is_isolated(3, now=105.1)
    assert not detector.is_isolated(1, now=200.0)
    assert detector.heard(now=104.0) == 0.0
    assert detector.heard(now=120.0) == 16.0
    assert not detector.is_isolated(3, now=121.0)


def test_leases_begin_anew_when_somebody_is_heard_again(
    control_plane: TimedControlPlane, client: Client
) -> None:
    """Two servers and a job's two ranks are silent for three leases; then they call again."""
    servers = [client.register(f"s{index}") for index in range(2)]
    ranks = [client.open(rank) for rank in range(2)]
    control_plane.pass_time(3 * LEASE_SECONDS)
    assert n_servers(client) == 2
    client.heartbeat(servers[0])
    # The others had no chance to be first.
    control_plane.pass_time(0.9 * LEASE_SECONDS)
    for lease in servers:
        client.heartbeat(lease)
    for rank, (job, lease) in enumerate(ranks):
        client.submit(job, lease, rank_manifest(0, rank))
