"""Ranks that run their nano-batches in different orders."""

from __future__ import annotations

from control_plane.jobs.waits import Waits
from distca.v1.jobs_pb2 import StepWaiting


def wait(nano_batch: int, sent: tuple[int, int], *needed: int) -> StepWaiting:
    """For the last tick that was sent in a nano-batch."""
    return StepWaiting(
        nano_batch=nano_batch, tick=sent[nano_batch] - 1, sent_ticks=sent, needed_ranks=needed
    )


def everywhere(rank: int, nano_batch: int) -> bool:
    """All ranks have rows in all nano-batches."""
    return True


def test_each_is_ahead_of_the_other_in_one_lane() -> None:
    waits = Waits()
    assert waits.wait(0, 0, wait(0, (5, 3), 1), everywhere) == ""
    assert waits.wait(1, 0, wait(1, (4, 4), 0), everywhere) == (
        "rank 1 runs nano-batch 1 before 0, and rank 0 0 before 1"
    )


def test_a_rank_that_waits_for_something_else_has_an_order_too() -> None:
    waits = Waits()
    waits.has_sent(1, 0, (0, 6))
    assert waits.wait(0, 0, wait(0, (4, 0), 1), everywhere) != ""


def test_a_slow_server_or_rank_is_nobodys_fault() -> None:
    waits = Waits()
    for sent in ((3, 3), (3, 2), (2, 2), (4, 4)):
        waits.has_sent(1, 0, sent)
        assert waits.wait(0, 0, wait(0, (3, 3), 1), everywhere) == ""


def test_what_is_known_of_a_rank_may_be_old() -> None:
    """Turns of two lanes: any two states of one order can be compared."""
    order = [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (3, 4), (4, 4), (4, 5), (5, 5)]
    for mine in order:
        for theirs in order:
            waits = Waits()
            waits.has_sent(1, 0, theirs)
            for lane in (0, 1):
                assert waits.wait(0, 0, wait(lane, mine, 1), everywhere) == ""


def test_lanes_without_rows_have_no_place_in_an_order() -> None:
    waits = Waits()
    waits.has_sent(1, 0, (4, 4))
    assert waits.wait(0, 0, wait(0, (5, 0), 1), lambda rank, lane: (rank, lane) != (0, 1)) == ""


def test_ranks_whose_rows_are_not_needed_may_have_another_order() -> None:
    waits = Waits()
    waits.has_sent(1, 0, (0, 6))
    assert waits.wait(0, 0, wait(0, (4, 0), 2), everywhere) == ""


def test_other_steps_do_not_count() -> None:
    waits = Waits()
    waits.has_sent(1, 1, (0, 6))
    assert waits.wait(0, 0, wait(0, (4, 0), 1), everywhere) == ""
