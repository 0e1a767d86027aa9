"""Ping-pong: what hides behind compute, and what does not."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distca.apps.simulator.ping_pong import (
    NanoBatchTimes,
    PortTransfer,
    exposed_seconds,
    stack_seconds,
)
from tests.support.errors import refused

SECONDS = st.floats(0, 10)


def ring(seconds: float, size: int = 2) -> PortTransfer:
    """Every endpoint sends to the next one."""
    ranks = np.arange(size)
    return PortTransfer(ranks, (ranks + 1) % size, np.full(size, seconds), np.full(size, seconds))


def alike(linear: float, request: float, attention: float, reply: float) -> NanoBatchTimes:
    """Two ranks that do the same."""
    return NanoBatchTimes(np.full(2, linear), ring(request), np.full(2, attention), ring(reply))


def test_without_ping_pong_everything_adds_up() -> None:
    assert stack_seconds((alike(1, 2, 3, 4),), 5) == pytest.approx(5 * 10)


def test_what_takes_no_longer_than_the_compute_beside_it_is_hidden() -> None:
    both = (alike(2, 2, 3, 2), alike(2, 3, 3, 2))
    n_layers = 6
    # Only the very last reply has nothing to hide behind.
    assert stack_seconds(both, n_layers) == pytest.approx(n_layers * 10 + 2)
    assert exposed_seconds(both, n_layers) == pytest.approx(2)


def test_slow_links_bound_a_layer_by_their_own_seconds() -> None:
    both = (alike(1, 20, 1, 20), alike(1, 20, 1, 20))
    per_layer = stack_seconds(both, 11) - stack_seconds(both, 10)
    assert per_layer == pytest.approx(80)


def test_a_long_request_of_the_second_nano_batch_is_partly_hidden() -> None:
    both = (alike(1, 0, 1, 0), alike(1, 3, 1, 0))
    # Q1 begins after L0 L1 and hides behind A0 for one of its three seconds.
    assert stack_seconds(both, 1) == pytest.approx(1 + 1 + 3 + 1)


def test_ranks_run_ahead_so_that_uneven_nano_batches_even_out() -> None:
    none = PortTransfer(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(2), np.zeros(2))
    zero = np.zeros(2)
    both = (
        NanoBatchTimes(zero, none, np.array([1.0, 3.0]), none),
        NanoBatchTimes(zero, none, np.array([3.0, 1.0]), none),
    )
    assert stack_seconds(both, 3) == pytest.approx(3 * 4)


@given(st.tuples(SECONDS, SECONDS, SECONDS, SECONDS), st.tuples(SECONDS, SECONDS, SECONDS, SECONDS))
def test_the_stack_lies_between_its_bounds(
    first: tuple[float, float, float, float], second: tuple[float, float, float, float]
) -> None:
    n_layers = 4
    ping, pong = alike(*first), alike(*second)
    both = stack_seconds((ping, pong), n_layers)
    compute = n_layers * (first[0] + first[2] + second[0] + second[2])
    links = n_layers * (first[1] + first[3] + second[1] + second[3])
    chains = [stack_seconds((only,), n_layers) for only in (ping, pong)]
    slack = 1e-9 * (1 + compute + links)
    assert both >= max(compute, links, *chains) - slack
    assert both <= sum(chains) + slack
    assert exposed_seconds((ping, pong), n_layers) >= -slack


def test_three_nano_batches_are_refused() -> None:
    with refused():
        stack_seconds((alike(1, 1, 1, 1),) * 3, 1)
