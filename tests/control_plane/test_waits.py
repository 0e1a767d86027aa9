"""Ranks that wait for each other."""

from __future__ import annotations

from control_plane.jobs.waits import Wait, Waits


def wait(nano_batch: int, sent: tuple[int, int], *needed: int, step: int = 0) -> Wait:
    """For the last tick that was sent in a nano-batch."""
    return Wait(
        step=step,
        nano_batch=nano_batch,
        tick=sent[nano_batch] - 1,
        sent_ticks=sent,
        needed_ranks=frozenset(needed),
    )


def test_two_ranks_in_different_lanes_wait_for_each_other() -> None:
    waits = Waits(n_layers=3)
    assert waits.wait(0, wait(0, (5, 3), 1), now=1.0) == ""
    # Rank 0 may have gone on since.
    assert waits.wait(1, wait(1, (4, 4), 0), now=2.0) == ""
    said = waits.wait(0, wait(0, (5, 3), 1), now=3.0)
    assert said == (
        "rank 0 for layer 1 backward of nano-batch 0, rank 1 for layer 2 backward of nano-batch 1"
    )


def test_a_rank_that_went_on_breaks_the_circle() -> None:
    waits = Waits(n_layers=3)
    waits.wait(0, wait(0, (5, 3), 1), now=1.0)
    waits.wait(1, wait(1, (4, 4), 0), now=2.0)
    assert waits.wait(0, wait(1, (5, 4), 1), now=3.0) == ""
    assert waits.wait(1, wait(1, (4, 4), 0), now=4.0) == ""


def test_a_slow_server_is_nobodys_fault() -> None:
    waits = Waits(n_layers=3)
    for now in (1.0, 2.0, 3.0):
        for rank in (0, 1):
            assert waits.wait(rank, wait(0, (3, 3), 1 - rank), now=now) == ""


def test_who_waits_for_a_rank_that_computes_is_not_stuck() -> None:
    waits = Waits(n_layers=3)
    for now in (1.0, 2.0):
        assert waits.wait(0, wait(0, (5, 3), 1, 2), now=now) == ""
        assert waits.wait(2, wait(0, (5, 3), 1), now=now) == ""


def test_three_ranks_in_a_circle_and_one_behind_them() -> None:
    waits = Waits(n_layers=3)
    chain = {
        0: wait(0, (5, 3), 1),
        1: wait(1, (4, 5), 2),
        2: wait(0, (5, 4), 3),
        3: wait(1, (4, 6), 0),
        4: wait(0, (5, 5), 1),
    }
    # Rank 2 needs rows that rank 3 has sent, so the circle is open.
    chain[3] = wait(1, (5, 6), 0)
    for now in (1.0, 2.0):
        for rank, each in chain.items():
            assert waits.wait(rank, each, now=now) == ""
    chain[3] = wait(1, (4, 6), 0)
    for now in (3.0, 4.0):
        for rank, each in chain.items():
            said = waits.wait(rank, each, now=now)
    assert said.count("rank ") == 5


def test_other_steps_do_not_count() -> None:
    waits = Waits(n_layers=3)
    for now in (1.0, 2.0):
        assert waits.wait(0, wait(0, (5, 3), 1), now=now) == ""
        assert waits.wait(1, wait(1, (4, 4), 0, step=1), now=now) == ""


def test_what_was_said_before_a_disturbance_is_void() -> None:
    waits = Waits(n_layers=3)
    waits.wait(0, wait(0, (5, 3), 1), now=1.0)
    waits.wait(1, wait(1, (4, 4), 0), now=2.0)
    waits.forget(0)
    assert waits.wait(0, wait(0, (5, 3), 1), now=3.0) == ""
    assert waits.wait(1, wait(1, (4, 4), 0), now=3.0) != ""
