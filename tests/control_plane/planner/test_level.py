"""The level that all servers would reach if work could be divided at will."""

from __future__ import annotations

import math

import numpy as np
import pytest

from control_plane.planner.level import find_level
from tests.control_plane.planner.compiled_calls import callable_from_python

level_of = callable_from_python(find_level)


def level(
    load: list[float], rate: list[float], receives: list[bool], homeless_pairs: float = 0.0
) -> float:
    pairs = sum(seconds / per for seconds, per in zip(load, rate, strict=True) if seconds)
    arrays = (np.array(load), pairs + homeless_pairs, homeless_pairs)
    return float(level_of(*arrays, np.array(rate), np.array(receives)))


def test_servers_that_receive_share_all_work_by_their_rates() -> None:
    # 6 and 2 pairs; the second server takes half the seconds for one.
    assert level([6.0, 1.0], [1.0, 0.5], [True, True]) == pytest.approx(8 / 3)


def test_who_receives_nothing_keeps_what_is_below_the_level() -> None:
    assert level([1.0, 5.0], [1.0, 1.0], [False, True]) == pytest.approx(5.0)
    assert level([5.0, 1.0], [1.0, 1.0], [False, True]) == pytest.approx(3.0)


def test_nobody_receives() -> None:
    assert level([2.0, 7.0], [1.0, 1.0], [False, False]) == pytest.approx(7.0)
    assert level([2.0, 7.0], [1.0, 1.0], [False, False], homeless_pairs=1.0) == math.inf


def test_work_without_a_home_counts() -> None:
    assert level([0.0, 0.0], [1.0, 1.0], [True, True], homeless_pairs=10.0) == pytest.approx(5.0)
