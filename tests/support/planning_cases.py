"""Small steps and servers that the planner tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from control_plane.planner.planning import PlanningServer
from core_attention.ca_task import qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import PlanServer
from core_attention.shape import AttentionShape
from tests import ROOT

PROFILE = CostProfile.load(ROOT / "distca/apps/simulator/profiles" / "h200-llama3-8b.json")
SHAPE = PROFILE.shape


def uniform_profile(
    seconds_per_pair: float = 1e-9, shape: AttentionShape = SHAPE, backward: float = 2.5
) -> CostProfile:
    """A kernel whose seconds are exactly proportional to query-key pairs; a backward pass takes
    ``backward`` times the forward."""
    grid = np.array([1, 2**31])
    q, kv = grid[:, None], np.maximum(grid[None, :], grid[:, None])
    pairs = qk_pairs(q, kv, shape.mask).astype(np.float64)
    return CostProfile(
        device="ideal",
        kernel="ideal",
        shape=shape,
        q_tokens=grid,
        kv_tokens=grid,
        forward_seconds=pairs * seconds_per_pair,
        backward_seconds=pairs * seconds_per_pair * backward,
    )


def in_place(
    n: int, *, profile: CostProfile = PROFILE, servers_per_host: int = 1, **fields: object
) -> list[PlanningServer]:
    """An in-place server for each of ``n`` ranks."""
    return [
        PlanningServer(
            server=PlanServer(f"rank-{i}", i, f"host-{i // servers_per_host}:1"),
            host=f"host-{i // servers_per_host}",
            profile=profile,
            **fields,  # type: ignore[arg-type]
        )
        for i in range(n)
    ]


def pool(n: int, *, profile: CostProfile = PROFILE, **fields: object) -> list[PlanningServer]:
    """``n`` servers of their own."""
    return [
        PlanningServer(
            server=PlanServer(f"pool-{i}", None, f"pool-{i}:1"),
            host=f"pool-{i}",
            profile=profile,
            **fields,  # type: ignore[arg-type]
        )
        for i in range(n)
    ]


def stream_manifest(
    lengths: Sequence[int], n_ranks: int, *, n_nano_batches: int = 1, span: bool = False
) -> Manifest:
    """Documents one after another over (rank, nano-batch), each of equal tokens but the last.

    Where a document reaches the end of its (rank, nano-batch) it goes on as a new document, or,
    with ``span``, on the next rank (one nano-batch only).
    """
    total = sum(lengths)
    per_piece = -(-total // (n_ranks * n_nano_batches))
    packed: list[list[list[Segment]]] = [
        [[] for _ in range(n_nano_batches)] for _ in range(n_ranks)
    ]
    row, next_id = 0, 0
    for length in lengths:
        offset = 0
        while offset < length:
            piece = row // per_piece
            take = min(length - offset, (piece + 1) * per_piece - row)
            rank, nano = divmod(piece, n_nano_batches)
            if span:
                packed[rank][nano].append(Segment(next_id, length, offset, take))
            else:
                packed[rank][nano].append(Segment(next_id, take, 0, take))
                next_id += 1
            offset, row = offset + take, row + take
        next_id += span
    ranks = [
        RankManifest(0, rank, tuple(tuple(segments) for segments in nanos))
        for rank, nanos in enumerate(packed)
    ]
    return Manifest.merge(ranks, n_ranks)


def assert_equal(left: Any, right: Any) -> None:
    """Equality of dataclasses with arrays inside."""
    assert type(left) is type(right)
    if isinstance(left, np.ndarray):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    elif is_dataclass(left):
        for field in fields(left):
            assert_equal(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right
