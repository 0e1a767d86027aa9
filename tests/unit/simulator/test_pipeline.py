"""Step times of pipelines without disaggregation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_attention.schedule import Kind
from core_attention.schedule_orders import interleaved, one_f_one_b, same_phase, zero_bubble
from distca.apps.simulator.pipeline import schedule_seconds
from tests.support.errors import refused

SIZES = (st.integers(1, 6), st.integers(1, 9))


@given(*SIZES)
def test_equal_microbatches_take_m_plus_p_minus_1_slots(n_stages: int, n_microbatches: int) -> None:
    forward = np.full((n_microbatches, 2), 1.5)
    seconds = {Kind.FORWARD: forward, Kind.BACKWARD: 2 * forward}
    for order in (one_f_one_b, same_phase):
        took = schedule_seconds(order(n_stages, n_microbatches), seconds)
        # Same-phase slots keep forwards and backwards apart; a stage that runs ahead of its slot
        # saves nothing, as the last stage has no bubble between its first and last action.
        assert took == pytest.approx([(n_microbatches + n_stages - 1) * 4.5] * 2)


@pytest.mark.parametrize(
    ("n_microbatches", "attention_seconds", "measured"),
    [
        (4, 0.37, 7.69),
        (4, 0.14, 6.06),
        (4, 0.585, 9.21),
        (8, 0.586, 14.55),
        (8, 0.134, 9.50),
    ],
)
def test_1f1b_takes_what_was_measured(
    n_microbatches: int, attention_seconds: float, measured: float
) -> None:
    """Four H200s, PyTorch's 1F1B, equal microbatches of 128K tokens."""
    microbatch = 0.726 + attention_seconds
    # How it divides into forward and backward does not matter where all microbatches are alike.
    seconds = {
        Kind.FORWARD: np.full((n_microbatches, 1), microbatch / 3),
        Kind.BACKWARD: np.full((n_microbatches, 1), microbatch * 2 / 3),
    }
    took = schedule_seconds(one_f_one_b(4, n_microbatches), seconds)
    # Rounded inputs, and transfers between stages, which are not modelled.
    assert float(took[0]) == pytest.approx(measured, rel=0.01)


def test_interleaving_and_backwards_in_two_parts_make_bubbles_smaller() -> None:
    whole = {Kind.FORWARD: np.ones((8, 1)), Kind.BACKWARD: np.full((8, 1), 2.0)}
    half = {kind: seconds / 2 for kind, seconds in whole.items()}
    parts = dict.fromkeys(Kind, np.ones((8, 1)))
    plain = float(schedule_seconds(one_f_one_b(4, 8), whole)[0])
    assert plain == 11 * 3
    # (p - 1) / v bubbles instead of p - 1 (arXiv 2104.04473, section 2.2).
    assert float(schedule_seconds(interleaved(4, 8), half)[0]) == 8 * 3 + 3 * 3 / 2
    # (p - 1) (F + I - W) (arXiv 2401.10241, table 2), for equal parts.
    assert float(schedule_seconds(zero_bubble(4, 8), parts)[0]) == 8 * 3 + 3


def test_missing_and_misshapen_seconds_are_refused() -> None:
    forward = {Kind.FORWARD: np.ones((2, 1))}
    for seconds in (forward, {**forward, Kind.BACKWARD: np.ones((3, 1))}):
        with refused():
            schedule_seconds(one_f_one_b(2, 2), seconds)
