"""Megatron-core from its wheel: loss and gradients equal those of float64 attention."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.frameworks.ranks import run_ranks
from tests.support.cluster import cluster

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(
    ("group", "n_ranks", "n_cases"),
    [
        ("dense", 2, 12),
        ("tensor parallelism", 2, 5),
        ("pipelines", 2, 6),
        ("experts and hybrid stacks", 2, 5),
        ("both", 4, 1),
    ],
)
def test_loss_and_gradients_are_those_of_plain_attention(
    group: str, n_ranks: int, n_cases: int, tmp_path: Path
) -> None:
    with cluster(tmp_path, 0) as control_plane:
        printed = run_ranks(
            "tests.cluster.frameworks.megatron_ranks",
            n_ranks,
            tmp_path,
            control_plane.address,
            group,
        )
    assert all(text.count("equal: ") == n_cases for text in printed), printed
