"""Parts of a plan that are made at the same time."""

from __future__ import annotations

import threading

import pytest

from control_plane.planner.side_by_side import threads


def test_results_come_in_the_order_of_the_arguments_though_the_last_is_made_first() -> None:
    made = [threading.Event() for _ in range(3)]

    def make(at: int) -> int:
        if at + 1 < len(made):
            assert made[at + 1].wait(10.0)
        made[at].set()
        return at

    with threads(3) as run:
        assert run(make, range(3)) == [0, 1, 2]


def test_one_thread_is_the_callers_own() -> None:
    with threads(1) as run:
        assert run(lambda _: threading.get_ident(), "ab") == [threading.get_ident()] * 2


def test_the_first_arguments_error_is_raised() -> None:
    def fail(why: str) -> None:
        raise ValueError(why)

    for n in (1, 2):
        with threads(n) as run, pytest.raises(ValueError, match="forward"):
            run(fail, ("forward", "backward"))
