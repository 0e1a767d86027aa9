"""Which inputs a rank keeps for the replays of others, and for how long."""

from __future__ import annotations

import pytest
import torch

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.step.lane_log import LaneLog, SentTick

LAYERS = 5


def complete_forward(log: LaneLog) -> list[SentTick]:
    """All forward ticks of a step, sent and completed one after the other."""
    ticks = []
    for layer in range(LAYERS):
        inputs = {name: torch.zeros(1) for name in "qkv"}
        sent = SentTick(Tick(0, layer, 0, Phase.FORWARD), layer, inputs, {}, None, awaited=[])
        log.add(sent)
        log.completed(sent)
        ticks.append(sent)
    return ticks


def test_own_queries_are_let_go_once_they_are_answered() -> None:
    ticks = complete_forward(LaneLog(shared=True))
    assert [sorted(sent.inputs or ()) for sent in ticks] == [["k", "v"]] * LAYERS


@pytest.mark.parametrize("kept", [1, 3])
def test_only_the_latest_forward_ticks_are_kept_if_so_asked(kept: int) -> None:
    ticks = complete_forward(LaneLog(shared=True, kept_forward_ticks=kept))
    assert [sent.inputs is not None for sent in ticks] == [
        layer >= LAYERS - kept for layer in range(LAYERS)
    ]


def test_rank_that_shares_no_document_keeps_nothing() -> None:
    assert all(sent.inputs is None for sent in complete_forward(LaneLog(shared=False)))
