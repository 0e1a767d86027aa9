"""Cost tables give the numbers of the profiles that they were made of."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from control_plane.planner.costs import (
    BACKWARD,
    FORWARD,
    PHASE_INDEX,
    UNCUT_TOKENS,
    Pace,
    causal_pairs,
    pace_seconds,
    pack_profiles,
    pair_seconds,
    pair_seconds_at,
    pair_seconds_of_both,
    place_keys,
    task_seconds,
)
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import PROFILE, SHAPE, uniform_profile


def uneven_profile() -> CostProfile:
    """Grids with several points in an octave, and with octaves that have none."""
    q, kv = np.array([1, 5, 6, 7, 300, 9000]), np.array([1, 3, 40, 41, 42, 1 << 20])
    rng = np.random.default_rng(1)
    forward, backward = rng.uniform(1e-6, 1e-3, (2, len(q), len(kv)))
    return CostProfile(
        device="any",
        kernel="any",
        shape=SHAPE,
        q_tokens=q,
        kv_tokens=kv,
        forward_seconds=forward,
        backward_seconds=backward,
    )


PROFILES = [PROFILE, uneven_profile(), uniform_profile()]
TABLES, UNCUT_RATES, INDEX = pack_profiles([PROFILES[1], PROFILES[0], PROFILES[1], PROFILES[2]])
BY_INDEX = [PROFILES[1], PROFILES[0], PROFILES[2]]
TOKENS = (1, 2, 5, 6, 7, 8, 41, 42, 128, 255, 256, 257, 1000, 9000, 70_000, 1 << 20)


def seconds_of(profile: CostProfile, q: int, kv: int, phase: Phase) -> float:
    return float(profile.seconds(np.array([q]), np.array([kv]), phase)[0])


def test_servers_with_one_profile_share_its_tables() -> None:
    assert INDEX.tolist() == [0, 1, 0, 2]
    alone, rates, index = pack_profiles([PROFILE, PROFILE])
    assert index.tolist() == [0, 0]
    assert len(alone.layout) == len(rates) == 1


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("profile", range(3))
def test_seconds_are_those_of_the_profile(profile: int, phase: Phase) -> None:
    """Inside the grids, at their points, between them, and beyond both of their ends."""
    task = callable_from_python(task_seconds)
    for q, kv in product(TOKENS, TOKENS):
        if q <= kv:
            ours = task(TABLES, profile, PHASE_INDEX[phase], kv - q, kv)
            # Rates are interpolated by the logarithms of tokens in both; only rounding differs.
            expected = seconds_of(BY_INDEX[profile], q, kv, phase)
            assert ours == pytest.approx(expected, rel=1e-9), (q, kv)


def test_all_ways_to_ask_for_a_rate_agree() -> None:
    rate = callable_from_python(pair_seconds)
    both = callable_from_python(pair_seconds_of_both)
    place, at = callable_from_python(place_keys), callable_from_python(pair_seconds_at)
    for profile, q, kv in product(range(3), (1.0, 6.5, 300.0), (300.0, 4096.0)):
        rates = [rate(TABLES, profile, phase, q, kv) for phase in (FORWARD, BACKWARD)]
        assert list(both(TABLES, profile, q, kv)) == rates
        for phase in (FORWARD, BACKWARD):
            assert at(TABLES, profile, place(TABLES, profile, phase, kv), q) == rates[phase]
        assert rates[0] != rates[1]


def test_rates_of_uncut_documents_are_looked_up_by_length() -> None:
    rate = callable_from_python(pair_seconds)
    for profile, length in product(range(3), (0, 1, 2, 41, 5000, UNCUT_TOKENS - 1)):
        expected = [rate(TABLES, profile, phase, length, length) for phase in (FORWARD, BACKWARD)]
        assert UNCUT_RATES[profile, length].tolist() == expected


def test_an_empty_task_takes_no_time_and_a_slow_server_more() -> None:
    task, pace = callable_from_python(task_seconds), callable_from_python(pace_seconds)
    assert task(TABLES, 0, FORWARD, 70, 70) == 0.0
    assert task(TABLES, 0, FORWARD, 70, 69) == 0.0
    whole = task(TABLES, 0, BACKWARD, 10, 70)
    assert pace(Pace(TABLES, 0, BACKWARD, 0.25), 10, 70) == pytest.approx(4 * whole)


def test_pairs_of_queries() -> None:
    count = callable_from_python(causal_pairs)
    for begin, end in ((0, 1), (0, 7), (5, 6), (100, 1000)):
        expected = int(causal_qk_pairs(np.array([begin]), np.array([end]))[0])
        assert count(begin, end) == expected == sum(range(begin + 1, end + 1))
