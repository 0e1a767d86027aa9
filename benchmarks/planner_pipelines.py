"""How long steps of pipelines take to plan, for ``benchmarks.planner --pipelines``.

Pretrain-like documents of at most half a microbatch of 128K tokens, each microbatch in two
nano-batches; H200 profile, two layers a stage, whose linear part is as measured. Milliseconds are
of all cores together, and of the clock, for the whole plan with its slots, from a manifest that is
merged. The best run tells what planning takes where nothing else runs, the median what it took
here.
"""

from __future__ import annotations

import time
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.training.methods import PROFILE
from benchmarks.gpu.training.microbatches import as_drawn, draw_microbatches, in_halves
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.slots import plan_slots
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest, RankManifest
from core_attention.pipelining import Pipelining
from core_attention.plan import PlanServer
from core_attention.schedule_orders import SCHEDULES

STAGES, MICROBATCHES, REPLICAS = 8, 16, (1, 8, 64)
ORDERS = ("1f1b", "zero-bubble")
RUNS = 30
TOKENS, LAYERS = 128 * 1024, 2
LINEAR_SECONDS = 0.726
"""Of a microbatch in a stage of two layers, forward and backward with recomputation, on an H200."""


def manifest_of(n_stages: int, n_microbatches: int, n_replicas: int) -> Manifest:
    """A step of ``n_replicas`` pipelines; the ranks of each hold the same documents."""
    manifests = []
    for replica in range(n_replicas):
        batch = draw_microbatches(replica, n_microbatches, TOKENS, "pretrain", TOKENS // 2)
        lengths = batch.lengths
        nano = [
            [int(lengths[document]) for document in half]
            for held in as_drawn(batch)
            for half in in_halves(held, lengths)
        ]
        manifests += [
            RankManifest.from_lengths(0, replica * n_stages + stage, nano)
            for stage in range(n_stages)
        ]
    return Manifest.merge(manifests, len(manifests))


def options_of(schedule: str, n_stages: int, n_microbatches: int, n_ranks: int) -> PlanningOptions:
    """Of idle-aware plans."""
    forward = LINEAR_SECONDS / TOKENS / 4  # a backward computes the forward again
    order = SCHEDULES[schedule](n_stages, n_microbatches)
    pipelining = Pipelining(
        schedule=order,
        pipeline_ranks=[rank % n_stages for rank in range(n_ranks)],
        layers=[LAYERS] * order.n_stages,
        forward_seconds=[forward] * order.n_stages,
        backward_seconds=[3 * forward] * order.n_stages,
    )
    return PlanningOptions(tolerance=0.03, pipelining=pipelining)


def report(console: Console) -> None:
    """A table of the times, by schedule and number of pipelines."""
    profile = CostProfile.load(PROFILE)
    table = Table(title=f"{STAGES} stages, {MICROBATCHES} microbatches, {TOKENS} tokens each")
    times = [f"{what} ms, {which}" for what in ("CPU", "wall") for which in ("best", "median")]
    for column in ("schedule", "replicas", "documents", *times, "over levels"):
        table.add_column(column, justify="left" if column == "schedule" else "right")
    for n_replicas in REPLICAS:
        manifest = manifest_of(STAGES, MICROBATCHES, n_replicas)
        servers = [
            PlanningServer(
                server=PlanServer(server_id=f"rank-{rank}", in_place_rank=rank, address=""),
                host=f"host-{rank // 8}",
                profile=profile,
            )
            for rank in range(manifest.n_ranks)
        ]
        for schedule in ORDERS:
            options = options_of(schedule, STAGES, MICROBATCHES, manifest.n_ranks)
            # The first plan compiles.
            plan = plan_slots(manifest, servers, profile.shape, options)
            cpu, wall = [], []
            for _ in range(RUNS):
                began = time.process_time(), time.perf_counter()
                plan = plan_slots(manifest, servers, profile.shape, options)
                cpu.append(time.process_time() - began[0])
                wall.append(time.perf_counter() - began[1])
            assert plan.slots is not None
            table.add_row(
                schedule,
                str(n_replicas),
                f"{manifest.n_documents:,}",
                *(
                    f"{1e3 * of_runs(seconds):.0f}"
                    for seconds in (cpu, wall)
                    for of_runs in (min, median)
                ),
                f"{plan.slots.step_imbalance:.3f}",
            )
    console.print(table)
