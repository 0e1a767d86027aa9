"""Random numbers by lane: those of the training loop are its own."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.cluster.trainer_client.test_transformers import (
    CONFIGS,
    make_batches,
    make_model,
    open_session,
    submit,
)
from tests.support.cluster import Cluster
from tests.support.loops import PingPong
from trainer_client import Session
from trainer_client.hooks.lane_random import LaneRandom


@pytest.fixture(scope="module")
def session(pool_of_four: Cluster) -> Iterator[Session]:
    with open_session(pool_of_four, "lane-random") as opened:
        yield opened


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)


def sampled() -> list[float]:
    """What a loop draws between two steps, as GRPO does for completions."""
    tokens = torch.multinomial(torch.ones(1000), 8)
    return [*tokens.tolist(), random.random(), float(np.random.rand())]


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_step_without_dropout_leaves_the_loops_random_numbers_alone(
    session: Session, interleave: bool, checkpointed: bool
) -> None:
    seed()
    expected = [sampled() for _ in range(3)]
    model: Any = make_model(CONFIGS["Llama"], "distca").train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    seed()
    found = [sampled()]
    for _ in range(2):
        with session.step(submit(session)):
            sum(o.loss for o in PingPong(model, interleave=interleave)(make_batches())).backward()
        found.append(sampled())
    assert found == expected


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
