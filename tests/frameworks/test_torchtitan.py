"""torchtitan from its wheel: loss and gradients equal those of float64 attention."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tests.cluster import cluster
from tests.frameworks.ranks import run_ranks

pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(600)]


PIPELINES = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters
"""With torch 2.13, torchtitan cannot run its own."""


@pytest.mark.parametrize(
    ("group", "n_nodes", "n_cases"),
    [("models", 0, 7 + PIPELINES), ("halves", 1, 7), ("halves-of-models", 0, 4)],
)
def test_loss_and_gradients_are_those_of_plain_attention(
    tmp_path: Path, group: str, n_nodes: int, n_cases: int
) -> None:
    with cluster(tmp_path, n_nodes) as running:
        ranks = "tests.frameworks.torchtitan_ranks"
        printed = run_ranks(ranks, 2, tmp_path, running.address, group)
    assert all(text.count("equal: ") == n_cases for text in printed), printed
