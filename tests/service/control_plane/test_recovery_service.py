"""Recoveries, over real gRPC: what the control plane tells whom, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from control_plane.jobs.coordinator import LATE_SECONDS
from control_plane.planner.planning import PlanningServer
from control_plane.server import ControlPlane
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from distca.contract import rpc
from distca.v1 import jobs_pb2, membership_pb2
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    Watcher,
    client_of,
    job_spec,
    rank_manifest,
    rotating_plan,
    running,
)


@dataclass
class Pair:
    """A job of two ranks."""

    client: Client
    job_id: str
    leases: list[str]
    watchers: list[Watcher]

    def submit(self, step: int) -> None:
        for rank, lease in enumerate(self.leases):
            self.client.submit(self.job_id, lease, rank_manifest(step, rank))

    def plans(self) -> list[jobs_pb2.StepPlanned]:
        """The next event of each rank, a plan."""
        return [watcher.next("step_planned") for watcher in self.watchers]

    def lose(
        self,
        server_id: str,
        rank: int = 0,
        *,
        epoch: int,
        cause: int = jobs_pb2.LOSS_CAUSE_TRANSPORT_ERROR,
    ) -> None:
        self.client.report_lost(self.job_id, self.leases[rank], server_id, epoch, cause=cause)

    def recover(self) -> jobs_pb2.Recover:
        """The next event of all ranks, a recovery."""
        first, second = (watcher.next("recover") for watcher in self.watchers)
        assert first == second
        assert isinstance(first, jobs_pb2.Recover)
        return first

    def answer(self, epoch: int, *steps: dict[int, Sequence[int] | None]) -> None:
        """Rank i answers with ``steps[i]``."""
        for lease, told in zip(self.leases, steps, strict=True):
            self.client.report_progress(self.job_id, lease, epoch, told)


def open_pair(client: Client, *, standby: bool = False, **spec: Any) -> Pair:
    opened = [client.open(rank, job_spec(**spec), stands_by=standby) for rank in (0, 1)]
    job_id = opened[0][0]
    leases = [lease for _, lease in opened]
    watchers = [client.watch_rank(job_id, lease) for lease in leases]
    for watcher in watchers:
        watcher.next("job_opened")
    return Pair(client, job_id, leases, watchers)


def servers_of(planned: jobs_pb2.StepPlanned) -> list[str]:
    return [server.server_id for server in planned.plan.servers]


def first_tick_of(planned: jobs_pb2.StepPlanned) -> list[int]:
    return [int(tick) for tick in np.frombuffer(planned.first_tick, "<i4")]


@pytest.mark.parametrize(
    ("number", "label"),
    [(jobs_pb2.LOSS_CAUSE_DEADLINE, "deadline"), (0, "unknown"), (77, "unknown")],
)
def test_losses_are_counted_by_their_cause(
    control_plane: ControlPlane, client: Client, number: int, label: str
) -> None:
    client.watch_server(client.register("s0"))
    pair = open_pair(client)
    pair.submit(0)
    epoch = pair.plans()[0].plan.epoch
    pair.lose("s0", epoch=epoch, cause=number)
    pair.lose("s0", rank=1, epoch=epoch - 1, cause=number)
    pair.recover()
    registry = control_plane.metrics.registry
    name = "distca_control_plane_failures_detected_total"
    assert registry.get_sample_value(name, {"cause": label}) == 1


@contextmanager
def started(**coordinator: Any) -> Iterator[tuple[TimedControlPlane, Client]]:
    with (
        running(coordinator=coordinator) as control_plane,
        client_of(control_plane.address) as client,
    ):
        yield control_plane, client


def test_losses_of_a_moment_are_one_recovery_which_waits_for_no_servers_to_come_back() -> None:
    with started(settle_seconds=20.0, rejoin_seconds=1000.0) as (control_plane, client):
        for server in ("s0", "s1", "s2"):
            client.register(server)
        pair = open_pair(client)
        pair.submit(0)
        epoch = pair.plans()[0].plan.epoch
        pair.lose("s0", epoch=epoch)
        pair.lose("s1", epoch=epoch - 1)
        control_plane.pass_time(10.0)
        pair.lose("s2", rank=1, epoch=epoch)
        assert all(watcher.is_quiet() for watcher in pair.watchers)
        control_plane.pass_time(10.0)
        assert pair.recover().lost_server_ids == ["s0", "s2"]


@pytest.mark.parametrize("others_run", [True, False])
def test_a_step_that_is_given_up_is_recovered_from_if_others_run_it(others_run: bool) -> None:
    with started(settle_seconds=5.0) as (control_plane, client):
        client.register("s0")
        pair = open_pair(client)
        pair.submit(0)
        pair.plans()
        for lease in pair.leases[others_run:]:
            client.jobs.ReportStep(
                jobs_pb2.ReportStepRequest(
                    job_id=pair.job_id,
                    step=0,
                    lease_id=lease,
                    given_up=jobs_pb2.StepGivenUp(reason="it raised"),
                )
            )
        for _ in range(2):
            control_plane.pass_time(5.0)
        if others_run:
            assert "rank 1 gave step 0 up: it raised" in pair.recover().reason
        else:
            assert [watcher.next("step_finished").step for watcher in pair.watchers] == [0, 0]
            assert pair.watchers[0].is_quiet()


def test_a_rank_that_does_not_answer_closes_the_job() -> None:
    with started(answer_seconds=10.0) as (control_plane, client):
        client.register("s0")
        pair = open_pair(client)
        pair.submit(0)
        pair.lose("s0", epoch=pair.plans()[0].plan.epoch)
        client.report_progress(pair.job_id, pair.leases[0], pair.recover().epoch, {0: [0, 0]})
        control_plane.pass_time(9.0)
        assert pair.watchers[0].is_quiet()
        control_plane.pass_time(2.0)
        assert "ranks [1] have not said" in pair.watchers[0].next("job_closed").error


def test_recoveries_in_which_nobody_gets_on_close_the_job() -> None:
    with started(max_fruitless_recoveries=1) as (_, client):
        pair = open_pair(client, placement=jobs_pb2.PLACEMENT_IN_PLACE)
        pair.submit(0)
        for _ in range(2):
            pair.lose("train.rank-1", epoch=pair.plans()[0].plan.epoch)
            pair.answer(pair.recover().epoch, {0: [0, 0]}, {0: [0, 0]})
        pair.lose("train.rank-1", epoch=pair.plans()[0].plan.epoch)
        assert "no rank has completed a tick" in pair.watchers[0].next("job_closed").error


def test_unfinished_steps_are_planned_again_from_where_their_ranks_stand(client: Client) -> None:
    streams = {server: client.watch_server(client.register(server)) for server in ("s0", "s1")}
    pair = open_pair(client)
    pair.submit(0)
    pair.submit(1)
    epoch = pair.plans()[0].plan.epoch
    pair.plans()
    for stream in streams.values():
        stream.next("job_opened")
        stream.next("step_planned")
        stream.next("step_planned")

    pair.lose("s0", epoch=epoch)
    recover = pair.recover()
    assert recover.epoch == epoch + 1
    assert recover.lost_server_ids == ["s0"]
    assert recover.reason == "rank 0 lost server s0: connection reset"
    for stream in streams.values():
        assert stream.next("recover") == recover

    pair.answer(recover.epoch, {0: [3, 2], 1: [0, 0]}, {0: [1, 4], 1: [0, 0]})
    # Each rank has documents of its own: two in nano-batch 0, one in nano-batch 1.
    for planned, expected in zip(pair.plans(), ([3, 3, 2], [1, 1, 4]), strict=True):
        assert servers_of(planned) == ["s1"]
        assert planned.plan.epoch == recover.epoch
        assert first_tick_of(planned) == expected
    assert [first_tick_of(planned) for planned in pair.plans()] == [[], []]
    planned = streams["s1"].next("step_planned")
    assert first_tick_of(planned) == [3, 3, 1, 1, 2, 4]
    assert streams["s1"].next("step_planned").plan.manifest.step == 1
    assert streams["s0"].is_quiet()


def test_finished_and_forgotten_steps_are_not_planned_again(client: Client) -> None:
    client.register("s0")
    client.register("s1")
    pair = open_pair(client)
    for step in (0, 1):
        pair.submit(step)
        epoch = pair.plans()[0].plan.epoch
    pair.lose("s0", epoch=epoch)
    recover = pair.recover()
    # Both have left step 0 behind, and only rank 0 has not yet heard that all have.
    pair.answer(recover.epoch, {0: None, 1: [2, 2]}, {1: [2, 2]})
    for planned in pair.plans():
        assert planned.plan.manifest.step == 1
    assert all(watcher.is_quiet() for watcher in pair.watchers)


def test_lost_server_is_left_out_until_it_registers_anew(client: Client) -> None:
    leases = {server: client.register(server) for server in ("s0", "s1")}
    pair = open_pair(client)
    pair.submit(0)
    pair.lose("s0", epoch=pair.plans()[0].plan.epoch)
    recover = pair.recover()
    pair.answer(recover.epoch, {0: [0, 0]}, {0: [0, 0]})
    pair.plans()
    pair.submit(1)
    assert servers_of(pair.plans()[0]) == ["s1"]
    deregister(client, leases["s0"])
    client.register("s0")
    pair.submit(2)
    assert servers_of(pair.plans()[0]) == ["s0", "s1"]


def test_server_whose_heartbeat_is_late_gets_no_work_while_others_are_there(
    control_plane: TimedControlPlane, client: Client
) -> None:
    leases = {server: client.register(server) for server in ("s0", "s1")}
    pair = open_pair(client)
    late_seconds = control_plane.coordinator.lease_seconds / 3 + LATE_SECONDS + 1.0
    control_plane.pass_time(late_seconds)
    client.heartbeat(leases["s1"])
    pair.submit(0)
    assert servers_of(pair.plans()[0]) == ["s1"]
    control_plane.pass_time(late_seconds)
    pair.submit(1)
    assert servers_of(pair.plans()[0]) == ["s0", "s1"], "all are late: rather this process is"


def test_server_that_lives_and_does_no_work_is_fenced() -> None:
    with (
        running(coordinator={"stall_seconds": 2.0}) as control_plane,
        client_of(control_plane.address) as client,
    ):
        lease = client.register("s0")
        client.register("s1")
        stream = client.watch_server(lease)
        pair = open_pair(client)
        pair.submit(0)
        pair.plans()
        stall(client, lease, 1.9)
        with fails(rpc.Reason.FENCED):
            stall(client, lease, 2.1)
        assert pair.recover().reason == "server s0 finished no work while serving step 0"
        stream.next("job_opened")
        stream.next("step_planned")
        ended = stream.end()
        assert ended is not None
        assert ended.reason is rpc.Reason.FENCED
        with fails(rpc.Reason.FENCED):
            client.heartbeat(lease)
        client.register("s0")


def test_ranks_compute_at_home_while_there_is_no_pool_and_go_back(client: Client) -> None:
    pair = open_pair(client, standby=True)
    pair.submit(0)
    for rank, planned in enumerate(pair.plans()):
        # Documents do not span ranks here, and a server that stands by keeps to its own.
        assert {server.in_place_rank for server in planned.plan.servers} >= {rank}
    lease = client.register("s0")
    pair.submit(1)
    planned = pair.plans()[0]
    assert servers_of(planned) == ["s0"]
    deregister(client, lease)
    recover = pair.recover()
    pair.answer(recover.epoch, {0: None, 1: [4, 4]}, {0: None, 1: [4, 4]})
    assert [watcher.next("step_finished").step for watcher in pair.watchers] == [0, 0]
    for planned in pair.plans():
        assert planned.plan.manifest.step == 1
        assert all(server.in_place_rank >= 0 for server in planned.plan.servers)


def test_pool_that_is_too_small_leaves_the_work_at_home_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def planner(
        manifest: Manifest, servers: Sequence[PlanningServer], *arguments: Any, **options: Any
    ) -> Plan:
        if any(server.capacity_rows == 1 for server in servers):
            raise PlanError("capacity_rows is 1; 100 are needed")
        return rotating_plan(manifest, servers, *arguments, **options)

    with (
        running({"rotating": planner}) as control_plane,
        client_of(control_plane.address) as client,
        caplog.at_level("INFO"),
    ):
        client.register("small", capacity_rows=1)
        pair = open_pair(client, standby=True)
        pair.submit(0)
        assert all(server.in_place_rank >= 0 for p in pair.plans() for server in p.plan.servers)
        assert "at home from step 0 on" in caplog.text
        bare = open_pair(client, name="bare")
        bare.submit(0)
        assert "100 are needed" in bare.watchers[0].next("step_failed").error


def test_begun_step_that_no_server_can_take_over_fails(client: Client) -> None:
    lease = client.register("s0")
    pair = open_pair(client)
    pair.submit(0)
    pair.plans()
    deregister(client, lease)
    pair.answer(pair.recover().epoch, {0: [1, 1]}, {0: [1, 1]})
    error = pair.watchers[0].next("step_failed").error
    assert error.startswith("the step has begun and cannot be planned again: no attention server")


def test_late_watchers_hear_of_a_recovery_until_they_have_answered(client: Client) -> None:
    lease_of = {server: client.register(server) for server in ("s0", "s1")}
    pair = open_pair(client)
    pair.submit(0)
    pair.lose("s0", epoch=pair.plans()[0].plan.epoch)
    recover = pair.recover()
    late = client.watch_rank(pair.job_id, pair.leases[0])
    late.next("job_opened")
    assert late.next("recover") == recover
    assert late.is_quiet()
    client.report_progress(pair.job_id, pair.leases[0], recover.epoch, {0: [0, 0]})
    later = client.watch_rank(pair.job_id, pair.leases[0])
    later.next("job_opened")
    assert later.is_quiet()
    # A server that comes late must refuse what is over.
    server = client.watch_server(lease_of["s1"])
    server.next("job_opened")
    assert server.next("recover") == recover
    client.report_progress(pair.job_id, pair.leases[1], recover.epoch, {0: [0, 0]})
    assert later.next("step_planned").plan.epoch == recover.epoch
    assert server.next("step_planned").plan.epoch == recover.epoch


def test_plan_in_the_making_is_void_when_a_recovery_begins() -> None:
    may_go_on = threading.Event()
    slow = threading.Event()

    def planner(*arguments: Any, **options: Any) -> Plan:
        if slow.is_set():
            assert may_go_on.wait(10)
        return rotating_plan(*arguments, **options)

    with (
        running({"rotating": planner}) as control_plane,
        client_of(control_plane.address) as client,
    ):
        client.register("s0")
        client.register("s1")
        pair = open_pair(client)
        pair.submit(0)
        epoch = pair.plans()[0].plan.epoch
        slow.set()
        pair.submit(1)
        pair.lose("s0", epoch=epoch)
        recover = pair.recover()
        pair.answer(recover.epoch, {0: [1, 1], 1: [0, 0]}, {0: [1, 1], 1: [0, 0]})
        may_go_on.set()
        for step in (0, 1):
            for planned in pair.plans():
                assert planned.plan.manifest.step == step
                assert planned.plan.epoch == recover.epoch
        assert all(watcher.is_quiet() for watcher in pair.watchers)


def test_steps_handed_in_during_a_recovery_are_planned_after_it(client: Client) -> None:
    client.register("s0")
    client.register("s1")
    pair = open_pair(client)
    pair.submit(0)
    pair.lose("s0", epoch=pair.plans()[0].plan.epoch)
    recover = pair.recover()
    pair.submit(1)
    assert all(watcher.is_quiet() for watcher in pair.watchers)
    pair.answer(recover.epoch, {0: [1, 1]}, {0: [1, 1], 1: [0, 0]})
    assert [planned.plan.manifest.step for planned in pair.plans()] == [0, 0]
    for planned in pair.plans():
        assert planned.plan.manifest.step == 1
        assert planned.plan.epoch == recover.epoch


def test_report_of_a_step_that_is_being_planned_again_is_taken(client: Client) -> None:
    client.register("s0")
    client.register("s1")
    pair = open_pair(client)
    pair.submit(0)
    pair.lose("s0", epoch=pair.plans()[0].plan.epoch)
    recover = pair.recover()
    for rank, lease in enumerate(pair.leases):
        client.report_rank(pair.job_id, lease, 0, rank)
    for watcher in pair.watchers:
        assert watcher.next("step_finished").step == 0
    pair.answer(recover.epoch, {}, {})
    assert all(watcher.is_quiet() for watcher in pair.watchers)


def deregister(client: Client, lease: str) -> None:
    client.membership.DeregisterServer(membership_pb2.DeregisterServerRequest(lease_id=lease))


def stall(client: Client, lease: str, seconds: float) -> None:
    client.membership.Heartbeat(
        membership_pb2.HeartbeatRequest(
            lease_id=lease,
            load=membership_pb2.ServerLoad(queued_tasks=3, oldest_ready_seconds=seconds),
        )
    )
