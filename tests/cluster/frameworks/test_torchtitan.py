"""torchtitan from its wheel: loss and gradients equal those of float64 attention."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tests.cluster.frameworks.ranks import run_ranks
from tests.support.cluster import cluster

pytestmark = pytest.mark.timeout(600)


TAKES_MICROBATCHES = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters
"""Whether torchtitan's pipelines run with this torch: from 2.14 on."""

PIPELINES = [("pipelines", 0, 2, 12), ("pipelines-of-replicas", 0, 4, 2)]


@pytest.mark.parametrize(
    ("group", "n_nodes", "n_ranks", "n_cases"),
    [
        ("models", 0, 2, 7),
        ("halves", 1, 2, 7),
        ("halves-of-models", 0, 2, 4),
        *(PIPELINES if TAKES_MICROBATCHES else []),
    ],
)
def test_loss_and_gradients_are_those_of_plain_attention(
    tmp_path: Path, group: str, n_nodes: int, n_ranks: int, n_cases: int
) -> None:
    with cluster(tmp_path, n_nodes) as running:
        ranks = "tests.cluster.frameworks.torchtitan_ranks"
        printed = run_ranks(ranks, n_ranks, tmp_path, running.address, group, str(n_ranks))
    assert all(text.count("equal: ") == n_cases for text in printed), printed
