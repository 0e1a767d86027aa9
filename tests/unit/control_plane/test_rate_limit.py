"""Callers may register in bursts, and steadily at the rate."""

from __future__ import annotations

import pytest

from control_plane.access.rate_limit import MAX_CALLERS, RateLimit


def test_a_burst_is_admitted_and_the_next_call_told_when() -> None:
    limit = RateLimit(per_second=2.0, burst=3)
    assert [limit.wait_seconds("a", now=0.0) for _ in range(3)] == [0.0, 0.0, 0.0]
    assert limit.wait_seconds("a", now=0.0) == pytest.approx(0.5)
    assert limit.wait_seconds("a", now=0.25) == pytest.approx(0.25)
    assert limit.wait_seconds("a", now=0.5) == 0.0


def test_refused_calls_cost_nothing() -> None:
    limit = RateLimit(per_second=1.0, burst=1)
    limit.wait_seconds("a", now=0.0)
    for _ in range(100):
        assert limit.wait_seconds("a", now=0.5) == pytest.approx(0.5)
    assert limit.wait_seconds("a", now=1.0) == 0.0


def test_callers_do_not_use_up_each_others_share() -> None:
    limit = RateLimit(per_second=1.0, burst=1)
    assert limit.wait_seconds("a", now=0.0) == 0.0
    assert limit.wait_seconds("a", now=0.0) > 0
    assert limit.wait_seconds("b", now=0.0) == 0.0


def test_waiting_never_saves_up_more_than_the_burst() -> None:
    limit = RateLimit(per_second=1.0, burst=2)
    limit.wait_seconds("a", now=0.0)
    assert [limit.wait_seconds("a", now=1e6) == 0.0 for _ in range(3)] == [True, True, False]


def test_memory_for_callers_is_bounded() -> None:
    limit = RateLimit(per_second=1.0, burst=1)
    for index in range(2 * MAX_CALLERS):
        limit.wait_seconds(str(index), now=0.0)
    assert len(limit._buckets) == MAX_CALLERS
