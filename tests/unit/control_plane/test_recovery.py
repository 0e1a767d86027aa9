"""The epochs and recoveries of a job, as pure state."""

from __future__ import annotations

import pytest

from control_plane.jobs.publication import first_ticks
from control_plane.jobs.quarantine import Quarantine
from control_plane.jobs.recovery import JobRecovery, is_finished
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest, Segment
from distca.v1.jobs_pb2 import StepProgress


def progress(step: int, *ticks: int, done: bool = False) -> StepProgress:
    return StepProgress(step=step, complete_ticks=ticks, done=done)


def lose(recovery: JobRecovery, *server_ids: str) -> int:
    """Begins a recovery for servers that were lost; its epoch."""
    for server_id in server_ids:
        recovery.call_for(f"{server_id} was lost", server_id)
    recovery.begin(now=1.0)
    return recovery.epoch


def test_recovery_that_starts_over_keeps_what_was_lost_and_drops_the_answers() -> None:
    recovery = JobRecovery()
    first = lose(recovery, "a")
    assert recovery.answer(0, first, [progress(3, 1)])
    second = lose(recovery, "b")
    assert recovery.lost == ["a", "b"]
    assert recovery.missing([0, 1]) == [0, 1]
    assert not recovery.answer(0, first, [progress(3, 1)])
    assert recovery.answer(0, second, [progress(3, 1)])
    assert recovery.missing([0, 1]) == [1]


def test_answers_outside_of_a_recovery_change_nothing() -> None:
    recovery = JobRecovery()
    assert not recovery.answer(0, 0, [])
    epoch = lose(recovery, "a")
    recovery.answer(0, epoch, [progress(1, 2)])
    assert recovery.end() == {0: {1: progress(1, 2)}}
    assert not recovery.answer(0, epoch, [progress(1, 3)])
    lose(recovery, "b")
    assert recovery.lost == ["b"]


def test_recoveries_without_a_new_loss_or_a_complete_tick_are_counted() -> None:
    recovery = JobRecovery()
    counted = []
    for _ in range(4):
        # Ticks complete before the first one only.
        recovery.answer(0, lose(recovery, "a"), [progress(3, 4, 4)])
        recovery.end()
        counted.append(recovery.fruitless)
    assert counted == [0, 0, 1, 2]
    recovery.answer(0, lose(recovery, "a"), [progress(3, 5, 4)])
    recovery.end()
    assert recovery.fruitless == 0
    for number in range(50):
        lose(recovery, f"server-{number}")
        recovery.end()
    assert recovery.fruitless == 0, "losing many servers one after the other is not in vain"
    lose(recovery, "server-0")
    recovery.end()
    assert recovery.fruitless == 1
    recovery.progressed()
    assert recovery.fruitless == 0


def test_the_reasons_of_recoveries_in_vain_are_kept_once_each() -> None:
    recovery = JobRecovery()
    for reason in ("first", "cause", "symptom", "cause", "symptom"):
        recovery.call_for(reason, "a")
        recovery.begin(now=0.0)
        recovery.end()
    assert recovery.in_vain == ["cause", "symptom"], "the first told of the server's loss"
    recovery.progressed()
    assert recovery.in_vain == []


def test_step_is_finished_when_all_who_still_know_it_are_done() -> None:
    done, running = progress(4, 8, done=True), progress(4, 8)
    assert is_finished(4, {0: {4: done}, 1: {4: done}})
    assert is_finished(4, {0: {4: done}, 1: {}})
    assert not is_finished(4, {0: {4: done}, 1: {4: running}})
    assert not is_finished(4, {0: {}, 1: {}})


def shared_step() -> Manifest:
    """Document 1 on ranks 0 and 1, document 2 on rank 1, in nano-batch 0; document 3 on ranks 1
    and 2 in nano-batch 1."""
    return Manifest.merge(
        [
            RankManifest(7, 0, ((Segment(1, 10, 0, 6),), ())),
            RankManifest(
                7, 1, ((Segment(1, 10, 6, 4), Segment(2, 5, 0, 5)), (Segment(3, 9, 0, 2),))
            ),
            RankManifest(7, 2, ((), (Segment(3, 9, 2, 7),))),
        ],
        3,
    )


def test_first_tick_is_the_least_of_the_ranks_that_hold_rows() -> None:
    first = first_ticks(shared_step(), [(2, 0), (3, 5), (0, 4)], left={})
    assert first.tolist() == [2, 3, 4]


def test_rows_of_a_rank_that_has_left_cannot_be_asked_for_again() -> None:
    left = {2: "has left the job"}
    with pytest.raises(PlanError):
        first_ticks(shared_step(), [(2, 0), (3, 5), (8, 8)], left)
    assert first_ticks(shared_step(), [(2, 0), (3, 8), (8, 8)], left).tolist() == [2, 3, 8]


def test_quarantine_doubles_with_every_loss_and_ends() -> None:
    quarantine = Quarantine()
    now, terms = 0.0, []
    for _ in range(7):
        terms.append(quarantine.add("s", now=now))
        assert quarantine.holds("s", heard_at=now + 1, now=now + terms[-1] - 0.1)
        now += terms[-1]
        assert not quarantine.holds("s", heard_at=now, now=now)
    assert terms == [10, 20, 40, 80, 160, 300, 300]
    assert not quarantine.holds("another", heard_at=0.0, now=0.0)


def test_reports_of_one_loss_count_once_and_its_quarantine_lasts_until_it_is_heard() -> None:
    quarantine = Quarantine()
    assert quarantine.add("s", now=0.0) == 10
    assert quarantine.add("s", now=4.0) == 6
    assert not quarantine.holds("s", heard_at=9.0, now=10.0)
    assert quarantine.holds("s", heard_at=-1.0, now=1000.0)
