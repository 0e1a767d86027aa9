"""The target load that all servers would reach if work could be divided at will."""

from __future__ import annotations

import math

import numpy as np
import pytest

from control_plane.planner.target_load import find_target_load
from tests.service.control_plane.planner.compiled_calls import callable_from_python

target_load_of = callable_from_python(find_target_load)


NONE, BOTH, SECOND = [False, False], [True, True], [False, True]


@pytest.mark.parametrize(
    ("load", "rate", "receives", "homeless_pairs", "base", "expected"),
    [
        # 6 and 2 pairs; the second server takes half the seconds for one.
        ([6.0, 1.0], [1.0, 0.5], BOTH, 0.0, [0.0, 0.0], 8 / 3),
        # Who receives nothing keeps what is below the target load.
        ([1.0, 5.0], [1.0, 1.0], SECOND, 0.0, [0.0, 0.0], 5.0),
        ([5.0, 1.0], [1.0, 1.0], SECOND, 0.0, [0.0, 0.0], 3.0),
        # Nobody receives.
        ([2.0, 7.0], [1.0, 1.0], NONE, 0.0, [0.0, 0.0], 7.0),
        ([2.0, 7.0], [1.0, 1.0], NONE, 1.0, [0.0, 0.0], math.inf),
        # Work without a home counts.
        ([0.0, 0.0], [1.0, 1.0], BOTH, 10.0, [0.0, 0.0], 5.0),
        # 8 pairs over bases of 3 and 1: both finish at 6.
        ([8.0, 0.0], [1.0, 1.0], BOTH, 0.0, [3.0, 1.0], 6.0),
        # The second does a pair in half the time: 2 and 8 pairs above the bases.
        ([10.0, 0.0], [1.0, 0.5], BOTH, 0.0, [3.0, 1.0], 5.0),
        # Never below what a rank computes besides.
        ([2.0, 0.0], [1.0, 1.0], BOTH, 0.0, [9.0, 0.0], 9.0),
        # The first keeps 5 - 2 of its 4 pairs, the second takes 1 above its base of 4.
        ([4.0, 0.0], [1.0, 1.0], SECOND, 0.0, [2.0, 4.0], 5.0),
        ([7.0, 0.0], [1.0, 1.0], NONE, 0.0, [2.0, 0.0], 9.0),
    ],
)
def test_servers_that_receive_share_all_work_by_their_rates_above_their_bases(
    load: list[float],
    rate: list[float],
    receives: list[bool],
    homeless_pairs: float,
    base: list[float],
    expected: float,
) -> None:
    pairs = sum(seconds / per for seconds, per in zip(load, rate, strict=True) if seconds)
    arrays = (np.array(load), pairs + homeless_pairs, homeless_pairs)
    found = target_load_of(np.array(base), *arrays, np.array(rate), np.array(receives))
    assert found == pytest.approx(expected)
