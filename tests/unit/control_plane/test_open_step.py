"""The open step that ranks join without numbers: the time comes from the test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from control_plane.jobs.job import Job
from control_plane.jobs.jobs import Jobs
from control_plane.jobs.open_step import JOIN_SECONDS, ROUND_JOIN_SECONDS, HandIn, OpenStep
from control_plane.jobs.step import FailedStep, ReadyStep
from core_attention.manifest import RankManifest
from distca.v1.jobs_pb2 import RankMeasurement
from tests.unit.control_plane.test_jobs import planned, spec

N_LANES = 4


class Ranks:
    """The ranks of a job, as the control plane hears them."""

    def __init__(self, n_ranks: int = 2, groups: Sequence[Sequence[int]] = ()) -> None:
        self.now = 0.0
        self.sequences = [0] * n_ranks
        of_rank = {rank: group for group in groups for rank in group}
        self.open_step = OpenStep(n_ranks, N_LANES, lambda rank: of_rank.get(rank, ()))

    def hand_in(
        self, rank: int, *, round_: int | None = None, closes: bool = False, **fields: Any
    ) -> None:
        if round_ is not None:
            self.open_step.closes(rank, round_ + closes)
            fields = {"round": round_, **fields}
        self.sequences[rank] += 1
        self.open_step.hand_in(rank, hand_in(self.sequences[rank], rank, since=self.now, **fields))

    def steps(self) -> list[tuple[int, list[int]]]:
        """Those that are planned now: number and ranks."""
        taken = []
        while (joined := self.open_step.take(self.now)) is not None:
            taken.append((joined.step, sorted(joined.hand_ins)))
        return taken


def hand_in(sequence: int, rank: int, n_lanes: int = N_LANES, **fields: Any) -> HandIn:
    fields = {"forward_only": False, **fields}
    manifest = RankManifest.from_lengths(0, rank, [[8 + rank], *[[]] * (n_lanes - 1)])
    return HandIn(sequence=sequence, manifest=manifest, **fields)


def test_a_step_is_planned_when_the_last_rank_has_joined_it() -> None:
    ranks = Ranks(3)
    for step in range(5):
        for rank in (2, 0):
            ranks.hand_in(rank)
            assert ranks.steps() == []
        ranks.hand_in(1)
        assert ranks.steps() == [(step, [0, 1, 2])]


def test_a_repeated_hand_in_changes_nothing_and_a_later_one_makes_it_void() -> None:
    ranks = Ranks()
    ranks.open_step.hand_in(0, hand_in(1, 0))
    ranks.open_step.hand_in(0, hand_in(3, 0, forward_only=True))
    ranks.open_step.hand_in(0, hand_in(2, 0))
    ranks.open_step.hand_in(1, hand_in(1, 1, forward_only=True))
    joined = ranks.open_step.take(0.0)
    assert joined is not None
    assert joined.hand_ins[0].sequence == 3
    ranks.open_step.hand_in(0, hand_in(3, 0))
    assert ranks.open_step.waiting == {}


def test_a_rank_that_has_said_the_last_of_its_round_is_excused_until_all_have() -> None:
    """Two and four forwards, then two each: nobody waits for the time to pass."""
    ranks = Ranks()
    planned = []
    for rank, closes in ((0, False), (1, False), (0, True), (1, False), (1, False), (1, True)):
        ranks.hand_in(rank, round_=0, closes=closes)
        planned += ranks.steps()
    assert planned == [(0, [0, 1]), (1, [0, 1]), (2, [1]), (3, [1])]
    # The next round: whichever comes first waits.
    ranks.hand_in(1, round_=1)
    assert ranks.steps() == []
    ranks.hand_in(0, round_=1, closes=True)
    assert ranks.steps() == [(4, [0, 1])]


def test_several_forwards_before_the_collective_are_of_one_round() -> None:
    ranks = Ranks()
    planned = []
    for rank, closes in ((0, True), (1, False), (0, True), (1, False), (1, True), (1, True)):
        ranks.hand_in(rank, round_=0, closes=closes)
        planned += ranks.steps()
    assert planned == [(0, [0, 1]), (1, [0, 1]), (2, [1]), (3, [1])]


def test_a_hand_in_before_its_forward_waits_for_its_round() -> None:
    ranks = Ranks()
    ranks.hand_in(0, round_=0, closes=True)
    ranks.hand_in(1, round_=0)
    assert ranks.steps() == [(0, [0, 1])]
    # Rank 0 sits in the collective, and has fetched its next batch.
    ranks.hand_in(0, round_=1, is_awaited=False)
    for step, closes in ((1, False), (2, True)):
        ranks.hand_in(1, round_=0, closes=closes)
        assert ranks.steps() == [(step, [1])]
    ranks.hand_in(1, round_=1, is_awaited=False)
    assert ranks.steps() == [(3, [0, 1])]


def test_a_hand_in_whose_forward_has_begun_waits_for_no_round() -> None:
    ranks = Ranks()
    ranks.open_step.closes(0, 1)
    ranks.open_step.closes(1, 0)
    ranks.hand_in(0, round_=1, is_awaited=False)
    ranks.now = 100.0
    assert ranks.steps() == []
    assert ranks.open_step.deadline() is None
    ranks.open_step.begins(0, 1, 1, ranks.now)
    assert ranks.steps() == []
    ranks.now += ROUND_JOIN_SECONDS
    assert ranks.steps() == [(0, [0])]


@pytest.mark.parametrize(
    ("round_", "seconds"), [(None, JOIN_SECONDS), (0, ROUND_JOIN_SECONDS)], ids=["silent", "told"]
)
def test_a_rank_that_does_not_come_is_waited_for_during_a_window(
    round_: int | None, seconds: float
) -> None:
    ranks = Ranks()
    for rank in (0, 1):
        ranks.hand_in(rank, round_=round_)
    assert len(ranks.steps()) == 1
    ranks.hand_in(0, round_=round_)
    assert ranks.open_step.deadline() == seconds
    ranks.now = seconds - 0.001
    assert ranks.steps() == []
    ranks.now = seconds
    joined = ranks.open_step.take(ranks.now)
    assert joined is not None
    assert joined.is_late
    ranks.hand_in(1, round_=round_)
    ranks.hand_in(0, round_=round_)
    assert ranks.steps() == [(2, [0, 1])]


@pytest.mark.parametrize("lag", [0.1, 0.35, 0.9, 1.4])
def test_ranks_that_drift_apart_come_together_by_the_rule_itself(lag: float) -> None:
    """Steps of one second, no collective, and rank 1 late by ``lag`` once."""
    ranks, seconds = Ranks(), 1.0
    for rank in (0, 1):
        ranks.open_step.took(rank, seconds)
    free_at = [0.0, lag]
    planned: list[tuple[int, list[int]]] = []
    while len(planned) < 12:
        deadline = ranks.open_step.deadline()
        ranks.now = min([*free_at, math.inf if deadline is None else deadline])
        for rank in (0, 1):
            if free_at[rank] <= ranks.now:
                free_at[rank] = math.inf
                ranks.hand_in(rank)
        for step, members in ranks.steps():
            planned.append((step, members))
            for rank in members:
                free_at[rank] = ranks.now + seconds
    assert [members for _, members in planned[4:]] == [[0, 1]] * 8


def test_steps_of_a_rank_that_are_open_have_nano_batches_of_their_own() -> None:
    ranks = Ranks()
    ranks.hand_in(0)
    ranks.hand_in(1)
    assert ranks.steps() == [(0, [0, 1])]
    for _ in range(3):
        ranks.hand_in(1)
        ranks.now += 1.0
        ranks.steps()
    # Rank 0 holds step 0 open; step 4 would be in its nano-batch.
    ranks.hand_in(0, open_places=frozenset({0}), first_step=4)
    ranks.hand_in(1)
    assert ranks.steps() == [(5, [0, 1])]
    # None is free for both: the eldest goes first, the other one next.
    ranks.hand_in(0, open_places=frozenset({0, 1}))
    ranks.hand_in(1, open_places=frozenset({2, 3}))
    assert ranks.steps() == [(6, [0])]
    ranks.now += 1.0
    assert ranks.steps() == [(8, [1])]


def test_steps_with_a_backward_pass_and_without_are_apart() -> None:
    ranks = Ranks()
    ranks.hand_in(0, forward_only=True)
    ranks.hand_in(1)
    assert ranks.steps() == [(0, [0])]
    ranks.hand_in(0)
    assert ranks.steps() == [(1, [0, 1])]


def test_tensor_parallel_groups_come_whole() -> None:
    ranks = Ranks(4, groups=[(0, 1), (2, 3)])
    for rank in (0, 1, 2):
        ranks.hand_in(rank)
    ranks.now = ROUND_JOIN_SECONDS
    assert ranks.steps() == [(0, [0, 1])]
    assert ranks.steps() == []
    ranks.hand_in(3)
    assert ranks.steps() == [(1, [2, 3])]


def test_a_rank_that_has_left_is_not_waited_for() -> None:
    ranks = Ranks()
    ranks.hand_in(0, round_=0)
    ranks.open_step.leave(1)
    assert ranks.steps() == [(0, [0])]


# As a job sees it.


def job_of(n_joined: int = 2) -> Job:
    jobs = Jobs(lease_seconds=10.0, retained_steps=64, max_pending_steps=4)
    job = jobs.create(spec(), job_id="train-1", key=b"t")
    for rank in range(n_joined):
        job.join(rank, host="h", lease_id=f"L{rank}", now=0.0)
    return job


def join(job: Job, rank: int, sequence: int, now: float = 0.0, **fields: Any) -> None:
    job.join_step(f"L{rank}", hand_in(sequence, rank, 2, since=now, **fields))


def report(job: Job, rank: int, step: int) -> None:
    measured = RankMeasurement(rank=rank, step_seconds=0.1, wait_seconds=None, tokens=1)
    job.report_rank(f"L{rank}", step, measured, 0.0)


def plan(job: Job, now: float = 0.0) -> ReadyStep:
    ready = job.take_joined(now=now)
    assert isinstance(ready, ReadyStep)
    job.planned(planned(ready.step))
    return ready


def test_absent_ranks_are_without_rows_and_have_finished() -> None:
    job = job_of()
    for rank in (0, 1):
        join(job, rank, 1)
    assert plan(job).sequences == {0: 1, 1: 1}
    join(job, 1, 2)
    assert job.take_joined(now=0.0) is None
    assert job.pending_steps == {1: [0]}
    ready = plan(job, now=1.0)
    assert (ready.step, ready.sequences, ready.without) == (1, {1: 2}, "late")
    assert [manifest.tokens(1) for manifest in ready.manifests] == [0, 9]
    report(job, 0, 0)
    report(job, 1, 0)
    assert job.take_finished() == 0
    assert [record.step for record in job.unfinished_steps()] == [1]
    report(job, 1, 1)
    assert job.take_finished() == 1
    assert job.take_finished() is None


def test_no_step_gets_a_number_that_a_rank_has_used_at_home() -> None:
    job = job_of()
    for rank in range(2):
        join(job, rank, 1)
    assert plan(job).step == 0
    report(job, 0, 0)
    report(job, 0, 3)
    for rank in range(2):
        join(job, rank, 2)
    assert plan(job).step == 4
    report(job, 1, 0)
    assert job.take_finished() == 3


def job_of_rank_0() -> Job:
    """The other one has not come, and rank 0 has joined the first step."""
    job = job_of(n_joined=1)
    join(job, 0, 1)
    return job


def test_a_rank_without_a_first_forward_is_waited_for_once() -> None:
    job = job_of_rank_0()
    assert job.open_step.deadline() == ROUND_JOIN_SECONDS
    assert job.take_joined(now=ROUND_JOIN_SECONDS - 0.001) is None
    now = ROUND_JOIN_SECONDS
    assert plan(job, now).without == "late"
    report(job, 0, 0)
    assert job.take_finished() == 0
    join(job, 0, 2, now)
    assert job.open_step.deadline() == pytest.approx(now + JOIN_SECONDS)
    job.join(1, host="h", lease_id="L1", now=now)
    join(job, 1, 1, now)
    ready = plan(job, now)
    assert (ready.step, ready.sequences) == (1, {0: 2, 1: 1})


def test_steps_fail_at_once_where_a_rank_was_refused() -> None:
    job = job_of_rank_0()
    job.refused(1, "another spec")
    failed = job.take_joined(now=0.0)
    assert isinstance(failed, FailedStep)
    assert job.failed(failed.step) == {0: 1}
