"""Pipeline schedules: their closed forms and their order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.simulator.errors import InputError
from distca.simulator.pipeline import one_f_one_b_order, one_f_one_b_seconds, pooled_ticks

SIZES = (st.integers(1, 6), st.integers(1, 9))


@given(*SIZES)
def test_equal_microbatches_take_m_plus_p_minus_1_slots(n_stages: int, n_microbatches: int) -> None:
    forward = np.full((n_microbatches, 2), 1.5)
    seconds = one_f_one_b_seconds(forward, 2 * forward, n_stages)
    assert seconds == pytest.approx([(n_microbatches + n_stages - 1) * 4.5] * 2)


def test_one_stage_adds_up_each_pipeline_on_its_own() -> None:
    forward = np.array([[1.0, 2.0], [3.0, 4.0]])
    assert one_f_one_b_seconds(forward, forward, 1).tolist() == [8.0, 12.0]


def test_a_slow_microbatch_delays_its_own_pipeline_only() -> None:
    forward = np.ones((4, 2))
    forward[1, 0] = 5
    seconds = one_f_one_b_seconds(forward, np.ones((4, 2)), 3)
    assert seconds[0] > seconds[1] == 12


@given(*SIZES)
def test_a_stage_holds_at_most_p_microbatches(n_stages: int, n_microbatches: int) -> None:
    for stage in range(n_stages):
        order = one_f_one_b_order(stage, n_stages, n_microbatches)
        assert sorted(order) == sorted((k, i) for k in "BF" for i in range(n_microbatches))
        in_flight = np.cumsum([1 if kind == "F" else -1 for kind, _ in order])
        assert in_flight.max() <= n_stages - stage


def _phases(n_stages: int, n_microbatches: int) -> Iterator[tuple[str, int, int]]:
    """(phase, stage, microbatch) in the order of pooled ticks: forward tick k + p - 1 comes right
    before backward tick k."""
    ticks = list(pooled_ticks(n_stages, n_microbatches))
    ahead = n_stages - 1
    for at in range(len(ticks) + ahead):
        if at < len(ticks):
            yield from (("F", s, i) for s, i in enumerate(ticks[at].forward) if i is not None)
        if at >= ahead:
            backward = ticks[at - ahead].backward
            yield from (("B", s, i) for s, i in enumerate(backward) if i is not None)


@given(*SIZES)
def test_pooled_ticks_run_everything_once_and_in_a_possible_order(
    n_stages: int, n_microbatches: int
) -> None:
    done: set[tuple[str, int, int]] = set()
    for phase, stage, i in _phases(n_stages, n_microbatches):
        if phase == "F":
            needs = ("F", stage - 1, i) if stage else None
        else:
            last = stage == n_stages - 1
            needs = ("F", stage, i) if last else ("B", stage + 1, i)
        assert needs is None or needs in done
        assert (phase, stage, i) not in done
        done.add((phase, stage, i))
    assert len(done) == 2 * n_stages * n_microbatches


@given(*SIZES)
def test_pooled_ticks_keep_up_to_2p_minus_1_microbatches_in_flight(
    n_stages: int, n_microbatches: int
) -> None:
    in_flight = np.cumsum(
        [
            1 if phase == "F" else -1
            for phase, stage, _ in _phases(n_stages, n_microbatches)
            if stage == 0
        ]
    )
    assert in_flight.max() == min(2 * n_stages - 1, n_microbatches)


@given(*SIZES)
def test_pooled_ticks_have_room_for_all_attention_on_all_stages(
    n_stages: int, n_microbatches: int
) -> None:
    ticks = list(pooled_ticks(n_stages, n_microbatches))
    assert len(ticks) == n_microbatches + n_stages - 1
    assert sum(tick.n_active for tick in ticks) == n_microbatches * n_stages


def test_bad_sizes_are_named() -> None:
    with pytest.raises(InputError, match="n_stages is 0"):
        one_f_one_b_seconds(np.ones((1, 1)), np.ones((1, 1)), 0)
    with pytest.raises(InputError, match=r"must both be \[n_microbatches, n_pipelines\]"):
        one_f_one_b_seconds(np.ones((1, 1)), np.ones((2, 1)), 1)
    with pytest.raises(InputError, match="n_microbatches is 0"):
        next(pooled_ticks(2, 0))
