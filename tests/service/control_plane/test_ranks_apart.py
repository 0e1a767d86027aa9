"""Ranks of a job that do not run the same steps: who waits for what cannot come is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from core_attention.manifest import RankManifest, Segment
from distca.v1 import jobs_pb2
from tests.service.control_plane.test_recovery_service import open_pair
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    client_of,
    rank_manifest,
    running,
)

LEAVE_SECONDS = 20.0


@pytest.fixture
def control_plane() -> Iterator[TimedControlPlane]:
    with running(coordinator={"leave_seconds": LEAVE_SECONDS, "settle_seconds": 0.01}) as started:
        yield started


@pytest.fixture
def client(control_plane: TimedControlPlane) -> Iterator[Client]:
    with client_of(control_plane.address) as client:
        client.register("s0")
        yield client


def spanning(step: int, rank: int) -> RankManifest:
    """In each nano-batch one document, of which each rank has a half."""
    return RankManifest(step, rank, tuple((Segment(1 + n, 64, 32 * rank, 32),) for n in range(2)))


def renew(client: Client, job_id: str, lease: str, next_step: int) -> None:
    client.jobs.RenewRank(
        jobs_pb2.RenewRankRequest(job_id=job_id, rank_lease_id=lease, next_step=next_step)
    )


def test_step_that_a_rank_has_passed_over_fails_with_its_name(client: Client) -> None:
    pair = open_pair(client)
    client.submit(pair.job_id, pair.leases[0], rank_manifest(4, 0))
    renew(client, pair.job_id, pair.leases[1], 4)
    assert pair.watchers[0].is_quiet()
    renew(client, pair.job_id, pair.leases[1], 6)
    # Told before it is submitted, and after.
    for step in (4, 5):
        if step == 5:
            client.submit(pair.job_id, pair.leases[0], rank_manifest(5, 0))
        for watcher in pair.watchers:
            failed = watcher.next("step_failed")
            assert failed.step == step
            assert failed.error == (
                f"ranks [1] have left, or gone on, without a manifest for step {step}; all ranks "
                "must run the same steps"
            )
    pair.submit(6)
    assert [event.plan.manifest.step for event in pair.plans()] == [6, 6]


def test_step_that_a_rank_has_handed_in_and_passed_over_stays_planned(client: Client) -> None:
    pair = open_pair(client)
    pair.submit(0)
    pair.plans()
    renew(client, pair.job_id, pair.leases[1], 3)
    assert all(watcher.is_quiet() for watcher in pair.watchers)


def test_rank_that_leaves_before_the_end_of_a_step_fails_it_for_those_who_need_its_rows(
    control_plane: TimedControlPlane,
    client: Client,
) -> None:
    pair = open_pair(client)
    for rank, lease in enumerate(pair.leases):
        client.submit(pair.job_id, lease, spanning(0, rank))
    pair.plans()
    client.close_job(pair.job_id, pair.leases[1])
    control_plane.pass_time(LEAVE_SECONDS)
    recover = pair.watchers[0].next("recover")
    assert recover.reason == "rank 1 has left the job and has not finished step 0"
    client.report_progress(pair.job_id, pair.leases[0], recover.epoch, {0: [3, 2]})
    failed = pair.watchers[0].next("step_failed")
    assert failed.step == 0
    assert "rank 1 has left the job" in failed.error
    assert "document 1 are needed" in failed.error


def test_rank_that_leaves_before_the_end_of_a_step_may_be_done_without(
    control_plane: TimedControlPlane, client: Client
) -> None:
    pair = open_pair(client)
    pair.submit(0)
    pair.plans()
    client.close_job(pair.job_id, pair.leases[1])
    control_plane.pass_time(LEAVE_SECONDS)
    recover = pair.watchers[0].next("recover")
    client.report_progress(pair.job_id, pair.leases[0], recover.epoch, {0: [3, 2]})
    planned = pair.watchers[0].next("step_planned")
    assert planned.plan.manifest.step == 0
    assert planned.plan.epoch == recover.epoch
