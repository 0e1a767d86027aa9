"""Random numbers by lane: those of the training loop are its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import nn

from trainer_client.hooks.lane_random import LaneRandom

Draws = Mapping[int, Callable[[], object]]
"""What lanes draw, by lane."""


def in_turns(draws: Draws, n_lanes: int = 2) -> None:
    lanes = LaneRandom(n_lanes)
    for lane in range(n_lanes):
        lanes.enter(lane)
        draws.get(lane, lambda: None)()
        lanes.leave(lane)
    lanes.end()


@pytest.mark.parametrize("drawing", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_lanes_draw_numbers_that_no_other_draws_and_the_same_if_seeded_alike(
    drawing: tuple[int, ...],
) -> None:
    dropout = nn.Dropout(0.5)

    def run() -> tuple[list[tuple[float, ...]], torch.Tensor]:
        torch.manual_seed(3)
        masks: list[tuple[float, ...]] = []
        for _ in range(3):
            lanes = dict.fromkeys(
                drawing, lambda: masks.append(tuple(dropout(torch.ones(64)).tolist()))
            )
            in_turns(lanes, n_lanes=3)
        return masks, torch.get_rng_state()

    masks, state = run()
    assert len(set(masks)) == 3 * len(drawing)
    again, same_state = run()
    assert masks == again
    assert torch.equal(state, same_state)
    torch.manual_seed(3)
    assert torch.equal(state, torch.get_rng_state()) is not bool(drawing)
