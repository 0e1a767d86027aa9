"""The target load that all servers would reach if work could be divided at will."""

from __future__ import annotations

import math

import numpy as np
import pytest

from control_plane.planner.target_load import find_target_load
from tests.service.control_plane.planner.compiled_calls import callable_from_python

target_load_of = callable_from_python(find_target_load)


def target_load(
    load: list[float],
    rate: list[float],
    receives: list[bool],
    homeless_pairs: float = 0.0,
    base: list[float] | None = None,
) -> float:
    pairs = sum(seconds / per for seconds, per in zip(load, rate, strict=True) if seconds)
    arrays = (np.array(load), pairs + homeless_pairs, homeless_pairs)
    besides = np.array(base or [0.0] * len(load))
    return float(target_load_of(besides, *arrays, np.array(rate), np.array(receives)))


def test_servers_that_receive_share_all_work_by_their_rates() -> None:
    # 6 and 2 pairs; the second server takes half the seconds for one.
    assert target_load([6.0, 1.0], [1.0, 0.5], [True, True]) == pytest.approx(8 / 3)


def test_who_receives_nothing_keeps_what_is_below_the_target_load() -> None:
    assert target_load([1.0, 5.0], [1.0, 1.0], [False, True]) == pytest.approx(5.0)
    assert target_load([5.0, 1.0], [1.0, 1.0], [False, True]) == pytest.approx(3.0)


def test_nobody_receives() -> None:
    assert target_load([2.0, 7.0], [1.0, 1.0], [False, False]) == pytest.approx(7.0)
    assert target_load([2.0, 7.0], [1.0, 1.0], [False, False], homeless_pairs=1.0) == math.inf


def test_work_without_a_home_counts() -> None:
    assert target_load([0.0, 0.0], [1.0, 1.0], [True, True], homeless_pairs=10.0) == pytest.approx(
        5.0
    )


def test_who_computes_nothing_besides_takes_more() -> None:
    # 8 pairs over bases of 3 and 1: both finish at 6.
    assert target_load([8.0, 0.0], [1.0, 1.0], [True, True], base=[3.0, 1.0]) == pytest.approx(6.0)
    # The second does a pair in half the time: 2 and 8 pairs above the bases.
    assert target_load([10.0, 0.0], [1.0, 0.5], [True, True], base=[3.0, 1.0]) == pytest.approx(5.0)


def test_the_target_load_is_never_below_what_a_rank_computes_besides() -> None:
    assert target_load([2.0, 0.0], [1.0, 1.0], [True, True], base=[9.0, 0.0]) == pytest.approx(9.0)


def test_who_receives_nothing_keeps_what_fits_beside_its_base() -> None:
    # The first keeps 5 - 2 of its 4 pairs, the second takes 1 above its base of 4.
    assert target_load([4.0, 0.0], [1.0, 1.0], [False, True], base=[2.0, 4.0]) == pytest.approx(5.0)
    assert target_load([7.0], [1.0], [False], base=[2.0]) == pytest.approx(9.0)
