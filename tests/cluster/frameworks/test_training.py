"""Frameworks from their wheels: loss and gradients equal those of float64 attention."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from tests.support.cluster import cluster
from tests.support.preloaded import run_forked

pytestmark = pytest.mark.timeout(600)

TAKES_MICROBATCHES = "arg_mbs" in inspect.signature(PipelineScheduleSingle.step).parameters
"""Whether torchtitan's pipelines run with this torch: from 2.14 on."""

PIPELINES = [
    ("torchtitan", "pipelines", 0, 2),
    ("torchtitan", "pipelines-of-replicas", 0, 4),
]


@pytest.mark.parametrize(
    ("framework", "group", "n_nodes", "n_ranks"),
    [
        ("megatron", "dense", 0, 2),
        ("megatron", "tensor parallelism", 0, 2),
        ("megatron", "pipelines", 0, 2),
        ("megatron", "experts and hybrid stacks", 0, 2),
        ("megatron", "both", 0, 4),
        ("torchtitan", "models", 0, 2),
        ("torchtitan", "halves", 1, 2),
        ("torchtitan", "halves-of-models", 0, 2),
        *(PIPELINES if TAKES_MICROBATCHES else []),
    ],
)
def test_loss_and_gradients_are_those_of_plain_attention(
    tmp_path: Path, framework: str, group: str, n_nodes: int, n_ranks: int
) -> None:
    with cluster(tmp_path, n_nodes) as running:
        run_forked(run_rank, (framework, tmp_path, running.address, group, n_ranks), n_ranks)


def run_rank(rank: int, framework: str, folder: Path, address: str, group: str, n: int) -> None:
    """Imports a framework in a process that runs nothing else."""
    ranks = importlib.import_module(f"tests.cluster.frameworks.{framework}_ranks")
    ranks.run_group(folder, address, group, rank, n)
