"""A node's link to the control plane, with a real one in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from attention_node.announced_jobs import PATIENCE_SECONDS, AnnouncedJobs
from attention_node.pool_link import PoolLink, PoolLinkLost
from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.v1 import jobs_pb2, membership_pb2
from tests.support.service_harness import (
    client_of,
    job_spec,
    rank_manifest,
    running,
    server_description,
)
from tests.support.waiting import eventually


class Node:
    """What a node does with its membership, as a list of words."""

    def __init__(
        self, settings: rpc.RpcSettings, server_id: str = "n0", *, away_seconds: float = 10.0
    ) -> None:
        self.told: list[str] = []
        self.at_work_seconds = 0.0
        self.lost = threading.Event()
        self.membership = PoolLink(
            settings,
            server_description(server_id),
            load=lambda: membership_pb2.ServerLoad(oldest_ready_seconds=self.at_work_seconds),
            on_event=self._event,
            on_registered=lambda: self.told.append("registered"),
            on_fenced=lambda: self.told.append("fenced"),
            on_drain=lambda: self.told.append("drain"),
            on_lost=self._lose,
            away_seconds=away_seconds,
        )

    def _event(self, event: jobs_pb2.PlanEvent) -> None:
        self.told.append(event.WhichOneof("event"))

    def _lose(self, error: PoolLinkLost) -> None:
        self.told.append(str(error))
        self.lost.set()


def reaching(address: str) -> rpc.RpcSettings:
    return rpc.RpcSettings(address=address, connect_seconds=2.0)


@contextmanager
def node_of(address: str) -> Iterator[Node]:
    node = Node(reaching(address))
    node.membership.join()
    try:
        yield node
    finally:
        node.membership.leave()


def n_servers(control_plane: ControlPlane) -> int:
    return len(control_plane.coordinator.servers())


def test_a_node_hears_of_jobs_plans_and_recoveries_and_leaves() -> None:
    with running() as control_plane, client_of(control_plane.address) as client:
        with node_of(control_plane.address) as node:
            job_id, lease = client.open(0, job_spec(n_ranks=1))
            client.submit(job_id, lease, rank_manifest(0, 0))
            eventually(lambda: node.told == ["registered", "job_opened", "step_planned"])
            epoch = client.jobs.GetStep(jobs_pb2.GetStepRequest(job_id=job_id, step=0)).plan.epoch
            client.report_lost(job_id, lease, "n0", epoch)
            eventually(lambda: node.told[3:] == ["recover"])
        assert n_servers(control_plane) == 0


def test_a_server_that_does_no_work_is_fenced_and_registers_when_it_works_again() -> None:
    limits = {"lease_seconds": 1.2, "stall_seconds": 2.0}
    with running(coordinator=limits) as control_plane, node_of(control_plane.address) as node:
        node.at_work_seconds = 2.5
        eventually(lambda: "fenced" in node.told)
        assert n_servers(control_plane) == 0
        assert node.told == ["registered", "fenced"]
        node.at_work_seconds = 0.0
        eventually(lambda: node.told == ["registered", "fenced", "registered"])
        assert n_servers(control_plane) == 1


def test_a_new_control_plane_is_told_of_the_server_and_its_jobs_stay() -> None:
    with running() as first:
        node = Node(reaching(first.address))
        node.membership.join()
        address = first.address
    try:
        with running(listen_address=address) as second:
            eventually(lambda: n_servers(second) == 1)
            eventually(lambda: node.told == ["registered", "registered"])
            with client_of(address) as client:
                client.open(0, job_spec(n_ranks=1))
                eventually(lambda: node.told[2:] == ["job_opened"])
            node.membership.leave()
            assert n_servers(second) == 0
    finally:
        node.membership.leave()


def test_a_standby_is_found_at_the_next_address() -> None:
    with ExitStack() as leading, running() as second:
        first = leading.enter_context(running())
        node = Node(reaching(f"{first.address},{second.address}"))
        node.membership.join()
        assert (n_servers(first), n_servers(second)) == (1, 0)
        leading.close()
        eventually(lambda: n_servers(second) == 1)
        # The node is told a moment after the control plane knows.
        eventually(lambda: node.told == ["registered", "registered"])
        node.membership.leave()


def test_a_draining_node_does_without_a_control_plane() -> None:
    with running() as control_plane:
        node = Node(reaching(control_plane.address), away_seconds=0.2)
        node.membership.join()
        node.membership.drain()
    assert not node.lost.wait(1.0)
    assert node.told == ["registered"]
    node.membership.leave()


def test_jobs_that_are_not_announced_again_are_forgotten() -> None:
    announced = AnnouncedJobs()
    announced.registered(now=0.0)
    announced.opened("a", "tenant")
    announced.opened("b", "tenant")
    assert announced.forgotten(["a", "b"], now=1000.0) == []
    announced.registered(now=1000.0)
    announced.opened("b", "tenant")
    assert announced.forgotten(["a", "b"], now=1000.0 + PATIENCE_SECONDS - 1) == []
    assert announced.forgotten(["a", "b"], now=1000.0 + PATIENCE_SECONDS) == ["a"]
