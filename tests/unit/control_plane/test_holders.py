"""A name that is asked for while somebody has it: of a job, whose processes may have been killed,
or of a server. As pure state: the time comes from the test."""

from __future__ import annotations

from typing import Any

import pytest

from control_plane.errors import (
    AlreadyExistsError,
    HeldError,
    OtherOwnerError,
    SpecMismatchError,
)
from control_plane.jobs.holders import ASKED_PER_SECOND, retry_seconds
from control_plane.jobs.job import Job
from control_plane.jobs.jobs import Jobs
from control_plane.jobs.membership import Membership, ServerLoad
from control_plane.jobs.rank_leases import Patience
from tests.unit.control_plane.test_jobs import LEASE_SECONDS, spec
from tests.unit.control_plane.test_membership import description

RENEWAL_SECONDS = LEASE_SECONDS / 3


@pytest.fixture
def jobs() -> Jobs:
    return Jobs(lease_seconds=LEASE_SECONDS, retained_steps=64, max_pending_steps=4)


def opened(jobs: Jobs, *ranks: int, **changes: Any) -> Job:
    """A job that ``ranks`` have joined at time 0 and watch."""
    job = jobs.create(spec(**changes), job_id="train-1", key=b"t", owner="me")
    for rank in ranks:
        job.join(rank, host=f"h{rank}", lease_id=f"L{rank}", now=0.0)
        job.watched_by(rank)
    return job


def ask(
    jobs: Jobs, rank: int, *, began: float, now: float, owner: str = "me", **changes: Any
) -> Job | None:
    """``rank`` of another start asks at ``now`` for the name that it waits for since ``began``."""
    return jobs.joinable(spec(**changes), rank, owner=owner, waited_seconds=now - began, now=now)


def test_rank_waits_while_the_job_before_may_be_dead_and_no_longer(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    for now in (3.0, 7.0, 9.9):
        with pytest.raises(HeldError, match=r"job train-1 .* rank 0 has joined .* h0") as caught:
            ask(jobs, 0, began=3.0, now=now)
        left = LEASE_SECONDS - now
        assert f"it ends in {left:.1f} s" in str(caught.value)
        assert 0.05 <= caught.value.retry_after_seconds <= min(left + 0.05, 1.05)
    jobs.close(job, "its leases have run out")
    assert ask(jobs, 0, began=3.0, now=10.1) is None


def test_job_that_lives_is_told_by_rank_and_host_after_a_lease(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    now, began = 0.0, 1.0
    while now - began < LEASE_SECONDS:
        now += RENEWAL_SECONDS
        for rank in (0, 1):
            job.renew(f"L{rank}", now=now)
        if now - began < LEASE_SECONDS:
            with pytest.raises(HeldError):
                ask(jobs, 1, began=began, now=now)
    with pytest.raises(AlreadyExistsError) as caught:
        ask(jobs, 1, began=began, now=now + 0.5)
    assert not isinstance(caught.value, HeldError)
    assert str(caught.value) == (
        "rank 1 has joined job train-1 from h1, and the job lives: rank 1 on h1 was heard 0.5 s "
        "ago, rank 0 on h0 was heard 0.5 s ago"
    )


def test_ranks_of_a_large_job_are_not_all_named(jobs: Jobs) -> None:
    job = opened(jobs, *range(6), n_ranks=6)
    for rank in range(6):
        job.renew(f"L{rank}", now=9.0)
    with pytest.raises(
        AlreadyExistsError,
        match=r"rank 4 on h4 .*, rank 0 .*, rank 1 .* s ago and "
        "3 more ranks live$",
    ):
        ask(jobs, 4, began=0.5, now=10.5, n_ranks=6)


def test_one_dead_rank_ends_the_job_whose_others_still_run(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    for now in (3.0, 6.0, 9.0):
        job.renew("L0", now=now)
        with pytest.raises(HeldError, match="rank 0 has joined"):
            ask(jobs, 0, began=1.0, now=now + 0.5)
    assert [lease.rank for lease in job.gone_ranks(Patience(), now=10.1)] == [1]


def test_lease_that_begins_anew_unheard_is_no_sign_of_life(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    job.renew_all(now=8.0)
    with pytest.raises(HeldError, match=r"it ends in 6\.0 s"):
        ask(jobs, 0, began=1.0, now=12.0)
    job.renew("L0", now=13.0)
    with pytest.raises(HeldError):
        ask(jobs, 0, began=1.0, now=14.0)
    job.renew("L1", now=14.0)
    with pytest.raises(AlreadyExistsError, match="the job lives"):
        ask(jobs, 0, began=1.0, now=15.0)


def test_rank_does_not_join_what_is_left_of_a_start_that_was_killed(jobs: Jobs) -> None:
    """Rank 1 died before it had joined, rank 0 after: both are started again."""
    job = opened(jobs, 0)
    jobs.stream_broken("train-1", 0, now=1.0)
    with pytest.raises(HeldError, match=r"ranks \[0\] of it have lost their connection"):
        ask(jobs, 1, began=2.0, now=2.0)
    # It was only the connection: the job is joined.
    job.watched_by(0)
    assert ask(jobs, 1, began=2.0, now=3.0) is job


def test_rank_joins_a_job_that_is_heard_without_a_stream(jobs: Jobs) -> None:
    job = opened(jobs, 0)
    job.stream_broken(0, now=1.0)
    job.renew("L0", now=9.0)
    assert ask(jobs, 1, began=0.5, now=11.0) is job


def test_stream_of_a_job_that_is_closed_may_break(jobs: Jobs) -> None:
    job = opened(jobs, 0)
    jobs.close(job, "over")
    jobs.stream_broken("train-1", 0, now=1.0)


def test_other_spec_is_refused_at_once_by_a_job_that_gathers(jobs: Jobs) -> None:
    opened(jobs, 0)
    with pytest.raises(SpecMismatchError, match="n_layers 9 instead of 4"):
        ask(jobs, 1, began=2.0, now=2.0, n_layers=9)


@pytest.mark.parametrize("rank", [0, 2])
def test_other_number_of_ranks_waits_for_the_end_of_the_job_before(jobs: Jobs, rank: int) -> None:
    job = opened(jobs, 0, 1)
    with pytest.raises(HeldError, match=r"with n_ranks 3 instead of 2"):
        ask(jobs, rank, began=2.0, now=2.0, n_ranks=3)
    for held in (0, 1):
        job.renew(f"L{held}", now=9.0)
    with pytest.raises(SpecMismatchError, match="n_ranks 3 instead of 2"):
        ask(jobs, rank, began=2.0, now=12.0, n_ranks=3)
    jobs.close(job, "over")
    assert ask(jobs, rank, began=2.0, now=13.0, n_ranks=3) is None


def test_other_spec_waits_for_what_is_left_of_a_start_that_was_killed(jobs: Jobs) -> None:
    job = opened(jobs, 0)
    job.stream_broken(0, now=1.0)
    with pytest.raises(HeldError, match="with n_ranks 1 instead of 2"):
        ask(jobs, 0, began=2.0, now=2.0, n_ranks=1)


def test_rank_that_has_left_waits_for_the_others(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    job.leave("L0", error="", now=1.0)
    with pytest.raises(
        HeldError, match=r"rank 0 has left job train-1, which ranks \[1\] still run"
    ):
        ask(jobs, 0, began=1.0, now=1.0)
    job.renew("L1", now=9.0)
    with pytest.raises(AlreadyExistsError, match=r"rank 0 has left .* rank 1 on h1 was heard 3\.0"):
        ask(jobs, 0, began=1.0, now=12.0)


def test_ranks_that_are_to_come_back_are_waited_for_until_their_time_is_over(jobs: Jobs) -> None:
    job = jobs.create(
        spec(), job_id="train-1", key=b"", absent=frozenset({0, 1}), return_by=2 * LEASE_SECONDS
    )
    job.come_back(0, host="h0", lease_id="L0", now=1.0)
    for now in (2.0, 8.0, 14.0):
        job.renew("L0", now=now)
        with pytest.raises(HeldError, match="rank 1 of job train-1 is to come back"):
            ask(jobs, 1, began=1.0, now=now + 1, owner="")
    job.renew("L0", now=19.0)
    with pytest.raises(HeldError, match=r"it ends in 0\.5 s"):
        ask(jobs, 1, began=1.0, now=19.5, owner="")


def test_another_identity_neither_waits_nor_learns_anything(jobs: Jobs) -> None:
    job = opened(jobs, 0, 1)
    job.stream_broken(0, now=1.0)
    with pytest.raises(OtherOwnerError) as caught:
        ask(jobs, 0, began=0.0, now=60.0, owner="somebody")
    assert "h0" not in str(caught.value)
    assert "train-1" not in str(caught.value)
    assert job.joined_ranks == [0, 1]


@pytest.mark.parametrize(
    ("n_waiting", "lease_seconds", "draw", "expected"),
    [
        (8, 15.0, 1.0, 1.05),
        (8, 15.0, 0.0, 0.05),
        (8, 1.0, 1.0, 0.30),
        (1000, 15.0, 0.5, 10.05),
        # Never later than the end of the lease.
        (1000, 15.0, 1.0, 12.05),
    ],
)
def test_ranks_of_large_jobs_ask_less_often(
    n_waiting: int, lease_seconds: float, draw: float, expected: float
) -> None:
    seconds = retry_seconds(
        112.0, n_waiting=n_waiting, lease_seconds=lease_seconds, now=100.0, draw=lambda: draw
    )
    assert seconds == pytest.approx(expected)


def test_all_who_wait_for_a_job_ask_about_a_hundred_times_a_second() -> None:
    """Each asks again after its time: how often, over one lease."""
    n_waiting, lease_seconds = 2000, 15.0
    asked = 0
    for _ in range(n_waiting):
        now = 0.0
        while now < lease_seconds:
            now += retry_seconds(
                lease_seconds, n_waiting=n_waiting, lease_seconds=lease_seconds, now=now
            )
            asked += 1
    # Those whose next time lies behind the end of the lease ask once more, then.
    assert asked - n_waiting < 1.2 * ASKED_PER_SECOND * lease_seconds


def test_server_waits_while_the_one_before_may_be_dead() -> None:
    membership = Membership(lease_seconds=LEASE_SECONDS)
    membership.register(description("a"), lease_id="A", now=0.0)
    with pytest.raises(HeldError, match=r"at h:1 on h, heard 4\.0 s ago; .* ends in 6\.0 s"):
        membership.register(description("a"), lease_id="A2", now=4.0)
    membership.renew_all(now=8.0)
    with pytest.raises(HeldError):
        membership.register(description("a"), lease_id="A2", now=14.0, waited_seconds=10.0)
    membership.heartbeat("A", ServerLoad(), now=15.0)
    with pytest.raises(AlreadyExistsError, match="which lives; give this one another id"):
        membership.register(description("a"), lease_id="A2", now=16.0, waited_seconds=12.0)
