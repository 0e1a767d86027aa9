"""The calls of a lane, compared with what the job expects."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from trainer_client.errors import SessionError
from trainer_client.machine.lane_calls import LaneCalls


def calls(*needs_backward: bool, n_layers: int = 3, forward_only: bool = False) -> LaneCalls:
    lane = LaneCalls("step 4 nano-batch 1", n_layers, forward_only=forward_only)
    assert [lane.forward(needed) for needed in needs_backward] == list(range(len(needs_backward)))
    return lane


def test_a_lane_in_order() -> None:
    lane = calls(True, True, True)
    lane.returned()
    assert lane.end == 6
    for layer in (2, 1, 0):
        lane.backward(layer)
    assert lane.backward_calls == 3


@pytest.mark.parametrize(
    ("needs_backward", "n_ticks"),
    [((True, True, True), 6), ((False, True, True), 5), ((False, False, False), 3)],
)
def test_a_lane_ends_with_the_lowest_layer_that_needs_gradients(
    needs_backward: tuple[bool, ...], n_ticks: int
) -> None:
    assert calls(*needs_backward[:2]).end is None
    assert calls(*needs_backward).end == n_ticks
    assert calls(*needs_backward, forward_only=True).end == 3


def test_a_call_of_several_ticks_is_one_call() -> None:
    lane = LaneCalls("", 3, forward_only=False, head_groups=2)
    assert [lane.forward(needed) for needed in (False, True, True)] == [0, 1, 2]
    assert lane.end == 2 * (3 + 2)


@pytest.mark.parametrize("made", [0, 1, 2])
def test_too_few_calls(made: int) -> None:
    lane = calls(*[True] * made)
    for too_early in (lane.returned, lambda: lane.backward(made - 1)):
        with pytest.raises(SessionError):
            too_early()


@pytest.mark.parametrize(
    ("lane", "wrong"),
    [
        (calls(True, n_layers=1), lambda lane: lane.forward(True)),
        (calls(True, True, True), lambda lane: lane.forward(True)),
        # An upper layer without gradients.
        (calls(False, True), lambda lane: lane.forward(False)),
        *((calls(True, True, True), lambda lane, at=at: lane.backward(at)) for at in (0, 1, 3)),
    ],
)
def test_calls_too_many_or_out_of_order(
    lane: LaneCalls, wrong: Callable[[LaneCalls], object]
) -> None:
    with pytest.raises(SessionError):
        wrong(lane)


def test_too_few_or_too_many_calls_in_a_stage() -> None:
    lane = calls()
    lane.stage_begins(1, 2)
    lane.forward(True)
    with pytest.raises(SessionError):
        lane.returned()
    lane.forward(True)
    lane.returned()
    with pytest.raises(SessionError):
        lane.forward(True)
    lane.stage_begins(3, 1)
    with pytest.raises(SessionError):
        lane.returned()
    lane.forward(True)
    lane.returned()
