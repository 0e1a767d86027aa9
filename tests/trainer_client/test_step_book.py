"""What a rank knows of its steps, as pure state."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from distca.v1 import jobs_pb2, plan_pb2
from tests.control_plane.test_jobs import planned
from trainer_client.step.step_book import HandedIn, PlannedStep, StepBook

HANDED_IN = HandedIn(plan_pb2.RankManifest(), forward_only=False)


def plan_of(step: int, epoch: int) -> PlannedStep:
    plan = replace(planned(step).plan, epoch=epoch)
    return PlannedStep(plan, False, np.zeros(plan.manifest.n_documents, dtype=np.int64))


def take(book: StepBook, step: int, epoch: int) -> bool:
    """Takes in a plan if it counts."""
    planned_step = plan_of(step, epoch)
    counts = book.counts(planned_step)
    if counts:
        book.plan(planned_step)
    return counts


def told(book: StepBook, *listed: jobs_pb2.StepProgress) -> dict[int, tuple[list[int], bool]]:
    return {p.step: (list(p.complete_ticks), p.done) for p in book.answer(listed)}


def test_higher_epoch_replaces_a_plan_and_nothing_else_does() -> None:
    book = StepBook(2)
    book.hand_in(3, HANDED_IN)
    assert take(book, 3, epoch=7)
    assert not take(book, 3, epoch=7)
    assert take(book, 3, epoch=8)
    assert not take(book, 3, epoch=7)
    assert not take(book, 4, epoch=7)
    current = book.plan_of(3)
    assert current is not None
    assert current.plan.epoch == book.epoch == 8


def test_recovery_voids_all_plans_of_lower_epochs() -> None:
    book = StepBook(2)
    for step in (3, 4):
        book.hand_in(step, HANDED_IN)
        take(book, step, epoch=7)
    book.recover(9)
    assert book.plan_of(3) is None
    assert book.plan_of(4) is None
    assert book.is_over(8)
    assert not book.is_over(9)
    assert not take(book, 3, epoch=8)
    assert take(book, 3, epoch=9)


def test_answer_tells_of_steps_that_were_handed_in_and_not_begun() -> None:
    book = StepBook(2)
    for step in (3, 4, 5):
        book.hand_in(step, HANDED_IN)
    book.begin(4)
    book.recover(1)
    running = jobs_pb2.StepProgress(step=4, complete_ticks=[6, 5])
    # Step 3 was left out.
    assert told(book, running) == {4: ([6, 5], False), 3: ([0, 0], True), 5: ([0, 0], False)}
    assert book.reported is not None
    book.recover(2)
    assert book.reported is None


def test_finished_steps_are_forgotten() -> None:
    book = StepBook(1)
    for step in (3, 4):
        book.hand_in(step, HANDED_IN)
        take(book, step, epoch=7)
    book.finish(3)
    assert [step for step, _ in book.handed_in()] == [4]
    assert book.plan_of(3) is None
    assert not book.is_known(3)
    assert told(book) == {4: ([0], False)}


def test_refused_step_is_told_once_and_may_be_handed_in_again() -> None:
    book = StepBook(1)
    book.hand_in(3, HANDED_IN)
    book.manifest_taken(3)
    book.refuse(3, "no server")
    book.refuse(8, "another rank's step")
    assert book.is_known(3)
    assert not book.is_known(8)
    assert book.handed_in() == []
    assert not book.is_taken(3)
    assert book.take_refusal(3) == "no server"
    assert book.take_refusal(3) is None
    assert not book.is_known(3)
    book.hand_in(3, HANDED_IN)
    assert book.is_known(3)


def test_steps_before_the_one_begun_last_are_behind_the_rank() -> None:
    book = StepBook(2)
    assert book.next_step == 0
    assert not book.is_finished(0)
    book.begin(3)
    assert book.next_step == 3
    assert not book.is_finished(3)
    book.finish(3)
    assert book.next_step == 4
    assert book.is_finished(3)
    assert not book.is_finished(4)
