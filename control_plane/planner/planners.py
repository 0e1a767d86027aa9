"""The planners that a job may name."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import numpy as np

from control_plane.planner import balanced
from control_plane.planner.compiled import NotInCacheError, only_from_cache
from control_plane.planner.planning import Planner, PlanningOptions, PlanningServer
from core_attention.arrays import int64_column
from core_attention.cost_model import CostProfile
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest
from core_attention.pipelining import Pipelining
from core_attention.plan import PlanServer
from core_attention.schedule_orders import SCHEDULES
from core_attention.shape import AttentionShape

PLANNERS: Mapping[str, Planner] = {"balanced": balanced.plan}


def load(planner: Planner) -> bool:
    """The same as :func:`prepare` if all that ``planner`` needs is in the cache, in about a second;
    else False, and nothing is compiled."""
    try:
        with only_from_cache():
            prepare(planner)
    except NotInCacheError:
        return False
    return True


def prepare(planner: Planner) -> None:
    """Plans a small step and drops the plan, so that what ``planner`` compiles on first use is
    compiled: without a cache on disk that takes tens of seconds, which no rank should wait for.

    The step has what compiled code may depend on: in-place servers and a pool server, unequal
    load, and both phases. It is planned as one of pipelines, too, if ``planner`` knows them.
    """
    shape = AttentionShape(
        num_heads=1, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="bfloat16"
    )
    profile = CostProfile(
        device="none",
        kernel="none",
        shape=shape,
        q_tokens=int64_column([1, 8192], "q_tokens"),
        kv_tokens=int64_column([1, 8192], "kv_tokens"),
        forward_seconds=np.array([[1e-9, 1e-5], [4e-2, 4e-2]]),
        backward_seconds=np.array([[2e-9, 2e-5], [8e-2, 8e-2]]),
    )
    manifests = [RankManifest.from_lengths(0, 0, [[8192]]), RankManifest.from_lengths(0, 1, [[64]])]
    servers = [
        PlanningServer(
            server=PlanServer(f"server-{index}", in_place_rank, "localhost:1"),
            host="localhost",
            profile=profile,
        )
        for index, in_place_rank in enumerate((None, 0, 1))
    ]
    manifest = Manifest.merge(manifests, 2)
    planner(manifest, servers, shape, PlanningOptions())
    pipelining = Pipelining(
        schedule=SCHEDULES["1f1b"](2, 1),
        pipeline_ranks=[0, 1],
        layers=[1, 1],
        forward_seconds=[1e-6, 1e-6],
        backward_seconds=[2e-6, 2e-6],
    )
    with contextlib.suppress(PlanError):
        planner(manifest, servers, shape, PlanningOptions(pipelining=pipelining))
