"""What begins a recovery and what does not, decision by decision; no control plane runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from control_plane.jobs.job_spec import JobPlacement
from control_plane.jobs.recoveries import Recoveries
from control_plane.jobs.recovery import JobRecovery
from control_plane.settings import CoordinatorSettings
from distca.contract.server_loss import LossCause, ServerLoss
from distca.v1 import jobs_pb2

SETTINGS = CoordinatorSettings()
EPOCH = 5

Due = list[tuple[Any, str]]
"""After how many seconds what is called, by its name."""


class Now:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Case:
    """The recoveries of one job, all else being played."""

    def __init__(self, placement: JobPlacement = JobPlacement.POOL) -> None:
        self.now = Now()
        self.closed: list[str] = []
        self.jobs, self.membership, self.metrics, self.plan = Mock(), Mock(), Mock(), Mock()
        self.streams = Mock()
        self.recoveries = Recoveries(
            SETTINGS,
            self.jobs,
            self.membership,
            self.streams,
            self.metrics,
            clock=self.now,
            plan=self.plan,
            go_on=Mock(),
            close=lambda _job, why: self.closed.append(why),
        )
        self.job: Any = Mock(
            job_id="train-1",
            epoch=EPOCH,
            recovery=JobRecovery(EPOCH),
            is_recovering=False,
            closed=None,
            leases=Mock(absent=set(), joined=[0, 1]),
        )
        self.job.spec.placement = placement
        self.job.take_finished.return_value = None
        self.jobs.open_jobs.return_value = [self.job]

    def run(self, what: Callable[[Recoveries], object]) -> Due:
        """Has it happen; returns after how many seconds what is due, by its name."""
        due: Due = []

        async def on_loop() -> None:
            loop = asyncio.get_running_loop()
            loop.call_later = lambda delay, callback, *_: due.append(  # type: ignore[assignment, method-assign]
                (delay, callback.__name__)
            )
            what(self.recoveries)

        asyncio.run(on_loop())
        return due

    def lose(self, epoch: int = EPOCH) -> Due:
        loss = ServerLoss(server_id="s", epoch=epoch, cause=LossCause.DEADLINE, detail="no reply")
        return self.run(lambda recoveries: recoveries.server_reported(self.job, 1, loss))


BEGINS: Due = [(pytest.approx(SETTINGS.settle_seconds), "_begin")]


def test_a_server_lost_under_the_present_plan_is_counted_left_out_and_recovered_from() -> None:
    case = Case()
    case.membership.find.return_value.in_place = None
    case.job.quarantine.add.return_value = 10.0
    assert case.lose() == BEGINS
    case.metrics.server_lost.assert_called_once_with(case.job, "s", LossCause.DEADLINE)
    case.job.quarantine.add.assert_called_once_with("s", now=100.0)
    case.job.recovery.begin(now=101.0)
    assert case.job.recovery.lost == ["s"]
    assert case.job.recovery.reasons == ["rank 1 lost server s: no reply"]


def test_what_a_rank_saw_in_an_epoch_that_is_over_says_nothing() -> None:
    case = Case()
    assert case.lose(epoch=EPOCH - 1) == []
    case.metrics.server_lost.assert_not_called()


def test_a_server_that_no_plan_names_is_not_missed() -> None:
    case = Case()
    case.job.names_server.return_value = False
    assert case.lose() == []
    case.metrics.server_lost.assert_not_called()


def test_an_in_place_server_is_not_left_out() -> None:
    case = Case()
    assert case.lose() == BEGINS
    case.job.quarantine.add.assert_not_called()


@pytest.mark.parametrize(
    ("placement", "serves", "recovering", "begins"),
    [
        (JobPlacement.POOL, 3, False, True),
        (JobPlacement.POOL, None, False, False),
        (JobPlacement.POOL, 3, True, False),
        (JobPlacement.IN_PLACE, 3, False, False),
    ],
)
def test_a_lease_that_ends_matters_to_jobs_that_the_server_serves(
    placement: JobPlacement, serves: int | None, recovering: bool, begins: bool
) -> None:
    case = Case(placement)
    case.job.step_served_by.return_value = serves
    case.job.is_recovering = recovering
    due = case.run(lambda recoveries: recoveries.server_gone(Mock(server_id="s"), "left"))
    assert due == (BEGINS if begins else [])


@pytest.mark.parametrize(
    ("absent", "recovering", "began", "begins"),
    [
        ([], True, False, True),
        ([1], True, False, False),
        ([], False, False, False),
        ([], True, True, False),
    ],
)
def test_ranks_that_have_all_come_back_are_asked_where_they_are(
    absent: list[int], recovering: bool, began: bool, begins: bool
) -> None:
    case = Case()
    case.job.leases.absent, case.job.is_recovering = absent, recovering
    if began:
        case.job.recovery.begin(now=99.0)
    due = case.run(lambda recoveries: recoveries.rank_came_back(case.job))
    assert due == ([(pytest.approx(SETTINGS.rejoin_seconds), "_begin")] if begins else [])


@pytest.mark.parametrize(("step", "waits"), [(7, True), (None, False)])
def test_a_rank_that_leaves_in_the_middle_of_a_step_is_waited_for(
    step: int | None, waits: bool
) -> None:
    case = Case()
    case.job.step_without.return_value = step
    due = case.run(lambda recoveries: recoveries.rank_left(case.job, 1))
    assert due == ([(SETTINGS.leave_seconds, "_go_on_without")] if waits else [])


@pytest.mark.parametrize(("others_run", "begins"), [(True, True), (False, False)])
def test_a_step_that_is_given_up_is_recovered_from_if_others_run_it(
    others_run: bool, begins: bool
) -> None:
    case = Case()
    case.job.others_may_run.return_value = others_run
    given_up = case.run(lambda recoveries: recoveries.step_given_up(case.job, 1, 7, "raised"))
    assert given_up == [(SETTINGS.settle_seconds, "_recover_without")]
    due = case.run(lambda recoveries: recoveries._recover_without(case.job, 1, 7, "raised"))
    assert due == (BEGINS if begins else [])


def test_ranks_are_told_once_what_all_have_finished() -> None:
    case = Case()
    case.run(lambda recoveries: recoveries.advance(case.job))
    case.streams.send_to_ranks.assert_not_called()
    case.job.take_finished.return_value = 4
    case.run(lambda recoveries: recoveries.advance(case.job))
    (_, event), _ = case.streams.send_to_ranks.call_args
    assert jobs_pb2.PlanEvent.FromString(event).step_finished.step == 4


def test_a_rank_that_does_not_answer_or_come_back_closes_the_job() -> None:
    case = Case()
    case.job.recovery.begin(now=case.now.seconds)
    case.now.seconds += SETTINGS.answer_seconds
    case.run(Recoveries.sweep)
    assert case.closed == []
    case.now.seconds += 1.0
    case.run(Recoveries.sweep)
    assert "ranks [0, 1] have not said in" in case.closed.pop()
    case.job.leases.absent, case.job.return_by = [1], case.now.seconds - 1.0
    case.run(Recoveries.sweep)
    assert "ranks [1] have not come back" in case.closed.pop()


def test_recoveries_in_which_nobody_gets_on_close_the_job() -> None:
    case = Case()
    case.job.begin_recovery = case.job.recovery.begin
    for _ in range(SETTINGS.max_fruitless_recoveries):
        case.run(lambda recoveries: recoveries._begin(case.job))
    assert case.closed == []
    case.run(lambda recoveries: recoveries._begin(case.job))
    assert "and no rank has completed a tick" in case.closed[0]
