"""Where cuts really lie: by seconds, at aligned positions, without pieces that are too short."""

from __future__ import annotations

import math

import pytest

from control_plane.planner.chunk import CutRules, cut_rules
from control_plane.planner.costs import Pace
from control_plane.planner.fit import Offer, fit_best, latest_end
from control_plane.planner.fleet import build_fleet
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, uniform_profile

FLEET = build_fleet(in_place(2, profile=uniform_profile(1.0)), 2)
DONOR = Pace(FLEET.tables, 0, 0, 1.0)
RECEIVER = Pace(FLEET.tables, 0, 0, 0.5)
"""Takes twice as long."""
ALIGNMENT = 16
RULES = cut_rules(0, 8, 3, 64, ALIGNMENT)._replace(alignment=ALIGNMENT)

fit = callable_from_python(fit_best)


def pairs(begin: int, end: int) -> int:
    return (end * (end + 1) - begin * (begin + 1)) // 2


def offer(low: int, high: int, *, surplus: float, room: float, shortest: int = 64) -> Offer:
    return Offer(low, high, float(pairs(low, high)), shortest, surplus, room, 0)


def fitted(given: Offer, at_end: float, rules: CutRules = RULES) -> tuple[int, int]:
    begin, end = fit(rules, DONOR, RECEIVER, given, at_end, 0)
    return int(begin), int(end)


def test_a_chunk_relieves_the_sender_of_its_surplus_and_of_hardly_more() -> None:
    begin, end = fitted(offer(0, 2048, surplus=200_000.0, room=math.inf), 1024.0)
    assert end == 1024
    assert begin % ALIGNMENT == 0
    assert pairs(begin, end) >= 200_000 > pairs(begin + ALIGNMENT, end)


def test_a_chunk_takes_the_receiver_at_most_its_room() -> None:
    begin, end = fitted(offer(0, 2048, surplus=math.inf, room=200_000.0), 1024.0)
    assert end == 1024
    assert 2 * pairs(begin, end) <= 200_000 < 2 * pairs(begin - ALIGNMENT, end)


def test_nothing_fits_into_too_little_room() -> None:
    begin, end = fitted(offer(0, 2048, surplus=math.inf, room=2.0 * pairs(1024 - 48, 1024)), 1024.0)
    assert end <= begin


@pytest.mark.parametrize("at_end", [2048.0, 2030.0, 1990.0])
def test_no_short_rest_is_left_behind_the_chunk(at_end: float) -> None:
    begin, end = fitted(offer(0, 2048, surplus=400_000.0, room=math.inf), at_end)
    assert end == 2048 or 2048 - end >= RULES.min_rest_tokens
    assert begin == 0 or begin >= RULES.min_rest_tokens
    assert end - begin >= RULES.min_tokens


def test_a_chunk_near_the_beginning_begins_there() -> None:
    given = offer(1000, 2048, surplus=250_000.0, room=math.inf)
    begin, end = fitted(given, 1240.0)
    assert begin == 1000
    assert pairs(begin, end) >= 250_000 > pairs(begin, end - ALIGNMENT)


def test_of_several_ends_the_one_with_most_seconds_for_a_byte_counts() -> None:
    given = offer(0, 4096, surplus=300_000.0, room=math.inf)

    def value(begin: int, end: int) -> float:
        useful = min(pairs(begin, end), 300_000)
        return useful / (RULES.q_bytes * (end - begin) + RULES.kv_bytes * end)

    far = 3000.0
    alone = fitted(given, far)
    best = tuple(int(at) for at in fit(RULES, DONOR, RECEIVER, given, far, 8))
    each = [fitted(given, far + shift * ALIGNMENT) for shift in range(-8, 9)]
    assert best in each
    assert value(*best) == pytest.approx(max(value(*one) for one in each))
    assert value(*best) > value(*alone)


def last_end(low: int, high: int, seconds: float) -> int:
    """By trying every end that the cuts allow."""
    ends = [*range((low // ALIGNMENT + 1) * ALIGNMENT, high, ALIGNMENT), high]
    fits = [end for end in ends if pairs(low, end) <= seconds]
    return fits[-1] if fits else low


@pytest.mark.parametrize(("low", "high"), [(0, 2048), (0, 2047), (37, 1999), (1600, 1650), (5, 9)])
def test_thelatest_end_is_found(low: int, high: int) -> None:
    latest = callable_from_python(latest_end)
    whole = float(pairs(low, high))
    tried = [0.0, -1.0, 0.5, whole, whole - 1.0, 2.0 * whole]
    tried += [share * whole for share in (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)]
    # What an end takes exactly, and a little less.
    exact = [float(pairs(low, end)) for end in range(low + 1, high, 97)]
    for seconds in [*tried, *exact, *(value - 0.5 for value in exact)]:
        expected = last_end(low, high, seconds)
        assert latest(DONOR, low, high, seconds, ALIGNMENT) == expected, seconds


def test_thelatest_end_counts_the_speed() -> None:
    latest = callable_from_python(latest_end)
    assert latest(RECEIVER, 0, 2048, 2.0 * pairs(0, 1024), ALIGNMENT) == 1024


def test_a_chunk_shifts_to_a_beginning_that_is_nearer_than_half_its_length() -> None:
    """Though the rest before it would be no short one."""
    begin, end = 13 * ALIGNMENT, 69 * ALIGNMENT
    surplus = float(pairs(begin, end))
    assert RULES.min_rest_tokens < begin < (end - begin) // 2
    shifted_begin, shifted_end = fitted(offer(0, 4096, surplus=surplus, room=math.inf), float(end))
    assert shifted_begin == 0
    assert pairs(0, shifted_end) >= surplus > pairs(0, shifted_end - ALIGNMENT)
