"""The services over real gRPC: a job's whole life, and every refusal with its status."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.jobs.membership import InPlace, Member
from control_plane.jobs.publication import planning_servers
from control_plane.jobs.requests import description_from_proto
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan
from distca.contract import rpc
from distca.contract.codec import plan_from_proto, plan_to_proto, rank_manifest_to_proto
from distca.contract.tokens import KEY_BYTES
from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2, plan_pb2
from tests.support.errors import fails
from tests.support.plan_slices import for_rank, for_server
from tests.support.service_harness import (
    SHAPE,
    Client,
    client_of,
    job_spec,
    rank_manifest,
    rotating_plan,
    running,
    server_description,
)
from tests.support.waiting import eventually

COMPILE_SECONDS = 300.0
"""Planners compile on first use: tens of seconds on a loaded machine without numba's cache."""


def open_pair(client: Client, spec: jobs_pb2.JobSpec | None = None) -> tuple[str, list[str]]:
    """Both ranks of a job join: its id, and their leases."""
    (job_id, first), (_, second) = (client.open(rank, spec) for rank in (0, 1))
    return job_id, [first, second]


def submit_pair(client: Client, job_id: str, leases: list[str], step: int) -> None:
    for rank in (0, 1):
        client.submit(job_id, leases[rank], rank_manifest(step, rank))


def expected_plan(step: int, server_ids: list[str], epoch: int) -> Plan:
    """What the rotating planner makes of the step on pool servers."""
    members = [
        Member(description=description_from_proto(server_description(s)), lease_id=s, renewed_at=0)
        for s in server_ids
    ]
    manifest = Manifest.merge([rank_manifest(step, rank) for rank in (0, 1)], 2)
    servers = planning_servers(members, SHAPE, {})
    return rotating_plan(manifest, servers, SHAPE, PlanningOptions(), epoch=epoch)


def test_job_of_two_ranks_on_two_servers_from_opening_to_closing(client: Client) -> None:
    leases_of = {server_id: client.register(server_id) for server_id in ("s1", "s0")}
    servers = {server_id: client.watch_server(lease) for server_id, lease in leases_of.items()}
    job_id, leases = open_pair(client)
    ranks = [client.watch_rank(job_id, lease) for lease in leases]

    (key,) = {watcher.next("job_opened").verification_key for watcher in servers.values()}
    assert len(key) == KEY_BYTES
    assert [watcher.next("job_opened").verification_key for watcher in ranks] == [b"", b""]

    # Plans come ahead of use: three steps are planned before one is reported.
    for step in range(3):
        submit_pair(client, job_id, leases, step)
    for step in range(3):
        for rank, watcher in enumerate(ranks):
            planned = watcher.next("step_planned")
            epoch = planned.plan.epoch
            whole = expected_plan(step, ["s0", "s1"], epoch)
            assert not planned.forward_only
            assert not planned.first_tick
            assert planned.plan == plan_to_proto(for_rank(whole, rank), job_id)
        for server_id, watcher in servers.items():
            planned = watcher.next("step_planned")
            assert planned.plan == plan_to_proto(for_server(whole, server_id), job_id)

    for step in range(3):
        for rank in (0, 1):
            client.report_rank(job_id, leases[rank], step, rank)
        for server_id, lease in leases_of.items():
            client.report_server(job_id, lease, step, server_id)
    answer = client.jobs.GetStep(jobs_pb2.GetStepRequest(job_id=job_id, step=1))
    assert answer.plan == plan_to_proto(expected_plan(1, ["s0", "s1"], epoch), job_id)
    assert answer.plan_seconds > 0
    assert [measured.server_id for measured in answer.servers] == ["s0", "s1"]
    assert [measured.step_seconds for measured in answer.ranks] == [2.0, 3.0]

    for watcher in ranks:
        assert [watcher.next("step_finished").step for _ in range(3)] == [0, 1, 2]
    client.close_job(job_id, leases[0])
    assert ranks[0].end() is None
    client.close_job(job_id, leases[1])
    assert ranks[1].next("job_closed").error == ""
    assert ranks[1].end() is None
    for watcher in servers.values():
        assert watcher.next("job_closed") == jobs_pb2.JobClosed(job_id=job_id)
        assert watcher.is_quiet()


def test_plans_of_a_job_come_in_step_order_and_forward_only_is_kept(client: Client) -> None:
    client.register("s0")
    job_id, leases = open_pair(client)
    watcher = client.watch_rank(job_id, leases[0])
    watcher.next("job_opened")
    for step in range(12):
        client.submit(job_id, leases[0], rank_manifest(step, 0), forward_only=step == 11)
    for step in range(12):
        client.submit(job_id, leases[1], rank_manifest(step, 1), forward_only=step == 11)
    planned = [watcher.next("step_planned") for _ in range(12)]
    assert [event.plan.manifest.step for event in planned] == list(range(12))
    assert [event.forward_only for event in planned] == [False] * 11 + [True]


def test_a_job_uses_the_servers_of_its_transport_alone(client: Client) -> None:
    """A rank that connected to another one would wait for an answer in vain."""
    client.register("s0", transport="nixl")
    client.register("s1", transport="ucxx")
    client.register("of-any-release")
    job_id, leases = open_pair(client, job_spec(transport="ucxx"))
    watcher = client.watch_rank(job_id, leases[0])
    assert watcher.next("job_opened").spec.transport == "ucxx"
    submit_pair(client, job_id, leases, 0)
    plan = plan_from_proto(watcher.next("step_planned").plan)
    assert [server.server_id for server in plan.servers] == ["of-any-release", "s1"]


def test_a_pool_of_another_transport_refuses_the_job(client: Client) -> None:
    client.register("s0", transport="ucxx")
    with fails(rpc.Reason.SPEC_MISMATCH):
        client.open(0, job_spec(transport="nixl"))
    client.register("s1", transport="nixl")
    client.open(0, job_spec(transport="nixl"))


def test_ranks_learn_what_the_pool_uses_before_they_open_a_job(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    def transports() -> list[str]:
        answer = client.jobs.DescribePool(jobs_pb2.DescribePoolRequest())
        return list(answer.transports)

    assert transports() == []
    client.register("s0", transport="ucxx")
    client.register("s1", transport="ucxx")
    client.register("of-any-release")
    assert transports() == ["ucxx"]
    assert "unlike" not in caplog.text
    lease = client.register("s2", transport="nixl")
    assert transports() == ["nixl", "ucxx"]
    assert "server s2 uses the transport nixl, unlike s0 (ucxx), s1 (ucxx)" in caplog.text
    client.membership.DeregisterServer(membership_pb2.DeregisterServerRequest(lease_id=lease))
    assert transports() == ["ucxx"]


def test_mixed_placement_uses_pool_servers_by_id_then_in_place_ones_by_rank(
    client: Client,
) -> None:
    for server_id in ("b", "a", "drained"):
        client.register(server_id)
    client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="drained"))
    job_id, leases = open_pair(client, job_spec(placement=jobs_pb2.PLACEMENT_MIXED))
    watcher = client.watch_rank(job_id, leases[1])
    watcher.next("job_opened")
    submit_pair(client, job_id, leases, 0)
    watcher.next("step_planned")
    plan = client.jobs.GetStep(jobs_pb2.GetStepRequest(job_id=job_id, step=0)).plan
    assert [s.server_id for s in plan.servers] == ["a", "b", "train.rank-0", "train.rank-1"]
    client.close_job(job_id, leases[0])
    listed = client.cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest()).servers
    assert [
        (s.server.server_id, s.draining, s.in_place_job_id, s.in_place_rank) for s in listed
    ] == [
        ("a", False, "", -1),
        ("b", False, "", -1),
        ("drained", True, "", -1),
        ("train.rank-1", False, job_id, 1),
    ]
    assert not listed[0].server.profiles


def test_late_watchers_get_the_unfinished_steps(client: Client) -> None:
    lease = client.register("s0")
    job_id, leases = open_pair(client)
    for step in (0, 1):
        submit_pair(client, job_id, leases, step)
    first = client.watch_rank(job_id, leases[0])
    first.next("job_opened")
    assert [first.next("step_planned").plan.manifest.step for _ in range(2)] == [0, 1]
    for rank in (0, 1):
        client.report_rank(job_id, leases[rank], 0, rank)
    late_rank = client.watch_rank(job_id, leases[1])
    late_server = client.watch_server(lease)
    for watcher in (late_rank, late_server):
        watcher.next("job_opened")
        if watcher is late_rank:
            assert watcher.next("step_finished").step == 0
        assert watcher.next("step_planned").plan.manifest.step == 1
        assert watcher.is_quiet()


def test_without_servers_the_step_fails_and_may_be_submitted_again(client: Client) -> None:
    job_id, leases = open_pair(client)
    watcher = client.watch_rank(job_id, leases[0])
    watcher.next("job_opened")
    submit_pair(client, job_id, leases, 4)
    failed = watcher.next("step_failed")
    assert (failed.job_id, failed.step) == (job_id, 4)
    with fails(rpc.Reason.UNKNOWN_STEP):
        client.jobs.GetStep(jobs_pb2.GetStepRequest(job_id=job_id, step=4))
    client.register("s0")
    submit_pair(client, job_id, leases, 4)
    assert watcher.next("step_planned").plan.manifest.step == 4


def test_planner_that_breaks_fails_the_step_instead_of_the_job(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(manifest: Manifest, *arguments: Any, **options: Any) -> Plan:
        if manifest.step == 0:  # what the control plane prepares with
            return rotating_plan(manifest, *arguments, **options)
        raise ZeroDivisionError("planner bug")

    with (
        running({"rotating": broken}) as control_plane,
        client_of(control_plane.address) as client,
    ):
        client.register("s0")
        job_id, leases = open_pair(client)
        watcher = client.watch_rank(job_id, leases[0])
        watcher.next("job_opened")
        submit_pair(client, job_id, leases, 1)
        assert "planner bug" in watcher.next("step_failed").error
    assert "planning step 1 failed" in caplog.text


def test_describe_job_shows_who_is_missing(client: Client) -> None:
    job_id, lease = client.open(1)
    client.submit(job_id, lease, rank_manifest(3, 1))
    described = client.jobs.DescribeJob(jobs_pb2.DescribeJobRequest(job_id=job_id))
    assert list(described.joined_ranks) == [1]
    assert [(p.step, list(p.missing_ranks)) for p in described.pending_steps] == [(3, [0])]
    assert described.planned_step == -1
    assert described.spec.name == "train"
    assert described.spec.min_backward_tokens == PlanningOptions().min_backward_tokens


def test_drained_server_learns_it_gets_no_more_plans_and_leaves(client: Client) -> None:
    leases_of = {server_id: client.register(server_id) for server_id in ("s0", "s1")}
    job_id, leases = open_pair(client)
    watcher = client.watch_rank(job_id, leases[0])
    watcher.next("job_opened")
    submit_pair(client, job_id, leases, 0)
    watcher.next("step_planned")
    assert not client.heartbeat(leases_of["s1"]).draining
    client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="s1"))
    assert client.heartbeat(leases_of["s1"]).draining
    submit_pair(client, job_id, leases, 1)
    assert [s.server_id for s in watcher.next("step_planned").plan.servers] == ["s0"]
    stream = client.watch_server(leases_of["s1"])
    stream.next("job_opened")
    assert stream.next("step_planned").plan.manifest.step == 0
    client.report_server(job_id, leases_of["s1"], 0, "s1")
    client.membership.DeregisterServer(
        membership_pb2.DeregisterServerRequest(lease_id=leases_of["s1"])
    )
    assert stream.end() is None
    assert watcher.is_quiet()


@pytest.mark.timeout(COMPILE_SECONDS + 60)
@pytest.mark.parametrize("planner", sorted(PLANNERS))
def test_every_planner_is_prepared_and_serves_a_job(planner: str) -> None:
    with (
        running(
            PLANNERS, coordinator={"default_planner": planner}, start_seconds=COMPILE_SECONDS
        ) as control_plane,
        client_of(control_plane.address) as client,
    ):
        client.register("s0")
        job_id, leases = open_pair(client, job_spec(placement=jobs_pb2.PLACEMENT_MIXED))
        watcher = client.watch_rank(job_id, leases[0])
        watcher.next("job_opened")
        submit_pair(client, job_id, leases, 0)
        plan = plan_from_proto(watcher.next("step_planned").plan)
        assert plan.planner == planner
        assert plan.manifest.tokens_per_rank(0)[0] == 12


def test_a_server_keeps_its_id_while_it_watches_and_is_not_replaced(client: Client) -> None:
    server, lease = server_description("s0"), client.register("s0")
    watcher = client.watch_server(lease)
    eventually(lambda: client.heartbeat(lease) is not None)
    with fails(rpc.Reason.ALREADY_EXISTS):
        client.register("s0", data_address="127.0.0.1:1")
    request = membership_pb2.RegisterServerRequest(server=server, replace=True)
    successor = client.membership.RegisterServer(request).lease_id
    ended = watcher.end()
    assert ended is not None
    assert ended.reason is rpc.Reason.FENCED
    with fails(rpc.Reason.FENCED):
        client.heartbeat(lease)
    client.heartbeat(successor)


def test_a_server_that_watches_no_more_makes_place_for_the_next(client: Client) -> None:
    watcher = client.watch_server(client.register("s0"))
    watcher.cancel()

    def is_free() -> bool:
        try:
            return bool(client.register("s0"))
        except rpc.RpcError:
            return False

    eventually(is_free)


@pytest.mark.parametrize(
    "changes",
    [
        {"data_address": "nowhere"},
        {"data_address": "host:0"},
        {"memory_bytes": -1},
        {"capacity_rows": -5},
        {"profiles": []},
    ],
    ids=str,
)
def test_register_server_refuses(client: Client, changes: dict[str, Any]) -> None:
    with fails(rpc.Reason.INVALID_REQUEST):
        client.register("s0", **changes)


IN_PLACE = {"placement": jobs_pb2.PLACEMENT_IN_PLACE}


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        ({"shape": None}, {}),
        ({"placement": 0}, {}),
        ({"placement": 9}, {}),
        ({"planner": "magic"}, {}),
        ({}, {"rank": 2}),
        ({}, {"host": ""}),
        (IN_PLACE, {}),
        (IN_PLACE, {"in_place_server": server_description("train.rank-0", profiles=[])}),
    ],
)
def test_open_job_refuses(client: Client, spec: dict[str, Any], fields: dict[str, Any]) -> None:
    opening = {"rank": 0, "host": "h", **fields}
    with fails(rpc.Reason.INVALID_REQUEST):
        client.jobs.OpenJob(jobs_pb2.OpenJobRequest(spec=job_spec(**spec), **opening))


def test_manifests_and_measurements_are_refused_unless_they_fit(client: Client) -> None:
    server_lease = client.register("s0")
    job_id, leases = open_pair(client)
    watcher = client.watch_rank(job_id, leases[0])
    watcher.next("job_opened")

    def submit(manifest: plan_pb2.RankManifest) -> None:
        client.hand_in(job_id, leases[0], jobs_pb2.HandIn(manifest=manifest))

    def report(lease: str, **measured: Any) -> None:
        step = jobs_pb2.ReportStepRequest(job_id=job_id, step=0, lease_id=lease, **measured)
        client.jobs.ReportStep(step)

    short = jobs_pb2.ServerMeasurement(server_id="s0", forward_busy_seconds=[1.0])
    wrong: list[Callable[[], object]] = [
        lambda: client.submit(job_id, leases[0], rank_manifest(0, 1)),
        lambda: client.submit(job_id, leases[0], RankManifest.from_lengths(0, 0, [[5]])),
        lambda: submit(plan_pb2.RankManifest(n_nano_batches=2, nano_batch=b"123")),
        lambda: client.report_rank(job_id, leases[0], 0, 1),
        lambda: client.report_server(job_id, server_lease, 0, "s9"),
        lambda: report(leases[0]),
        lambda: report(server_lease, server=short),
    ]
    submit_pair(client, job_id, leases, 0)
    watcher.next("step_planned")
    for call in wrong:
        with fails(rpc.Reason.INVALID_REQUEST):
            call()
    with fails(rpc.Reason.UNKNOWN_STEP):
        client.report_rank(job_id, leases[0], 5, 0)


def test_no_pool_server_or_job_passes_for_a_ranks_server(client: Client) -> None:
    with fails(rpc.Reason.INVALID_REQUEST):
        client.register("train.rank-0")
    with fails(rpc.Reason.INVALID_REQUEST):
        client.open(0, job_spec(name="train.rank-0"))
    client.open(0, job_spec(placement=jobs_pb2.PLACEMENT_IN_PLACE))


def test_unknown_lease_is_named_in_every_call(client: Client) -> None:
    job_id, _ = client.open(0)
    calls: list[Callable[[], Any]] = [
        lambda: client.jobs.RenewRank(jobs_pb2.RenewRankRequest(job_id=job_id, rank_lease_id="no")),
        lambda: client.close_job(job_id, "no"),
        lambda: client.submit(job_id, "no", rank_manifest(0, 0)),
        lambda: client.watch_rank(job_id, "no").next(),
        lambda: client.report_rank(job_id, "no", 0, 0),
        lambda: client.report_server(job_id, "no", 0, "s0"),
        lambda: client.heartbeat("no"),
        lambda: client.watch_server("no").next(),
        lambda: client.membership.DeregisterServer(
            membership_pb2.DeregisterServerRequest(lease_id="no")
        ),
    ]
    for call in calls:
        with fails(rpc.Reason.LEASE_EXPIRED):
            call()
    with fails(rpc.Reason.UNKNOWN_SERVER):
        client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="no"))


def test_health_says_serving_for_every_service(client: Client) -> None:
    health = health_pb2_grpc.HealthStub(client.channel)
    for service in ("", "distca.v1.Jobs", "distca.v1.Membership"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with fails(rpc.Reason.NOT_FOUND):
        health.Check(health_pb2.HealthCheckRequest(service="nope"))


def test_reader_that_falls_behind_is_dropped_and_may_watch_again() -> None:
    with (
        running(coordinator={"max_queued_events": 2}) as control_plane,
        client_of(control_plane.address) as client,
    ):
        client.register("s0")
        job_id, leases = open_pair(client)
        own = partial(jobs_pb2.WatchRankRequest, job_id=job_id, rank_lease_id=leases[0])
        said: SimpleQueue[Any] = SimpleQueue()
        said.put(own())
        stuck = client.jobs.WatchRank(iter(said.get, None))
        next(stuck)
        # Slices of a few hundred kilobytes fill the connection's window within a few steps.
        segments = tuple(Segment(i, 1, 0, 1) for i in range(20_000))
        for step in range(40):
            manifest = rank_manifest_to_proto(RankManifest(step, 0, (segments, ())))
            said.put(own(hand_in=jobs_pb2.HandIn(manifest=manifest)))
            client.submit(job_id, leases[1], RankManifest(step, 1, ((), ())))
            for rank in (0, 1):
                eventually(partial(is_planned, client, job_id, step))
                client.report_rank(job_id, leases[rank], step, rank)
            if client.watching(control_plane, "rank") == 0:
                break
        with fails(rpc.Reason.BACKLOG):
            for _ in stuck:
                pass
        client.watch_rank(job_id, leases[0]).next("job_opened")


def is_planned(client: Client, job_id: str, step: int) -> bool:
    request = jobs_pb2.DescribeJobRequest(job_id=job_id)
    return bool(client.jobs.DescribeJob(request).planned_step >= step)


def test_planning_servers_scale_the_nearest_profile_and_drain_in_place_ones() -> None:
    description = description_from_proto(server_description("s0", capacity_rows=100))
    member = Member(
        description=description,
        lease_id="x",
        renewed_at=0,
        in_place=InPlace("job", 3),
        draining=True,
    )
    (server,) = planning_servers([member], SHAPE, {"s0": 0.5})
    assert server.server.in_place_rank == 3
    assert server.capacity_rows == 100
    assert server.speed == 0.5
    assert not server.receives
    np.testing.assert_array_equal(
        server.profile.forward_seconds, description.profiles[0].forward_seconds
    )
