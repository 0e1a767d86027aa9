"""Compiles the planners before they are needed."""

from __future__ import annotations

import numpy as np

from control_plane import balanced, greedy
from control_plane.planning import PlanningOptions, PlanningServer
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import PlanServer
from core_attention.shape import AttentionShape


def warm_up() -> None:
    """Plans a tiny step with every planner, so that no later step waits for the compiler.

    Takes about half a minute of one core once per installation, less than a second when the machine
    code is in numba's cache already. Call it before serving, or while building an image.
    """
    shape = AttentionShape(num_heads=1, num_heads_kv=1, head_dim=8, head_dim_v=8, dtype="float32")
    grid = np.array([1, 1 << 20])
    seconds = np.ones((2, 2)) * grid[:, None] * np.maximum(grid[None, :], grid[:, None])
    profile = CostProfile(
        device="none",
        kernel="none",
        shape=shape,
        q_tokens=grid,
        kv_tokens=grid,
        forward_seconds=seconds,
        backward_seconds=seconds,
    )
    ranks = [RankManifest.from_lengths(0, 0, [[4096]]), RankManifest.from_lengths(0, 1, [[8]])]
    manifest = Manifest.merge(ranks, 2)
    servers = [
        PlanningServer(server=PlanServer(str(i), rank, ""), host=str(i), profile=profile)
        for i, rank in enumerate((0, None))
    ]
    for planner in (greedy, balanced):
        planner.plan(manifest, servers, shape, PlanningOptions())
