"""README's loop as it stands, on two GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.rank_group import RankGroup
from core_attention.shape import AttentionShape
from tests.cluster.end_to_end.test_readme import (
    N_RANKS,
    WATCHED,
    compare_with_local_attention,
    example,
    python_path,
)
from tests.support.cluster import Cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < N_RANKS, reason=f"needs {N_RANKS} CUDA devices"),
    pytest.mark.timeout(600),
]

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="bfloat16")
LIMIT_SECONDS = 180.0
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-3, 5e-2
"""Those of ``--verify`` in bfloat16."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("readme"), device="cuda", node_shape=SHAPE)
    try:
        for rank in range(N_RANKS):
            cluster.start_node(f"node-{rank}", device=f"cuda:{rank}")
        yield cluster
    finally:
        cluster.close()


@pytest.mark.parametrize("placement", ["in-place", "mixed"])
def test_the_example_trains_on_gpus(tmp_path: Path, servers: Cluster, placement: str) -> None:
    (tmp_path / "train.py").write_text(example())
    (tmp_path / "watched.py").write_text(WATCHED)
    group = RankGroup(
        [sys.executable, "watched.py", "train.py", servers.address, placement, str(tmp_path)],
        N_RANKS,
        tmp_path / "logs",
        limit_seconds=LIMIT_SECONDS,
        environ={
            **os.environ,
            "PYTHONPATH": python_path(),
            "DISTCA_CONTROL_PLANE": servers.address,
            "DISTCA_PLACEMENT": placement,
        },
        cwd=tmp_path,
    )
    assert group.wait() == [0] * N_RANKS, group.tails(60)
    compare_with_local_attention(
        tmp_path,
        gradient_tolerance=GRADIENT_TOLERANCE,
        loss_tolerance=LOSS_TOLERANCE,
    )
