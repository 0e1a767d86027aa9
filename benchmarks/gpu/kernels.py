"""Fused CA-tasks as the planner makes them, against whole documents with the same operations.

Each batch draws document lengths, packs them over the ranks and plans one step on a cost profile
measured here. Then every server's parts of the step run on one GPU, one kernel call a server and
phase, with tensors laid out as in a tick. Beside them the same documents run whole, spread over as
many plain library calls. Both do the same operations, so the ratio of their rates is what cutting
and moving cost inside the kernel.

    python -m benchmarks.gpu.kernels --json kernels.json
"""

from __future__ import annotations

import importlib
import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from attention_node.tick_route import ASSEMBLED, TickRoute, derive_tick_route
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Int64Array, exclusive_cumsum, int64_column
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel
from core_attention.kernels.select import select_kernel
from core_attention.plan import Plan, PlanServer
from core_attention.profiling import QUICK_GRIDS, device_name, measure_profile
from core_attention.shape import AttentionShape
from distca.simulator.lengths import sample_lengths
from distca.simulator.packing import pack_in_order

WARM_UPS, REPEATS = 2, 7


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One phase of one batch, summed over servers.

    Attributes:
        seed: of the batch.
        phase: forward or backward.
        tasks: CA-tasks of the step.
        parts: kernel parts that they form.
        median_task_tokens: queries of the median task, weighted by work.
        fused_tflops: 1e12 operations per second of the fused calls, all servers' together.
        whole_tflops: the same of whole documents.
        ratio: fused / whole.
        predicted_imbalance: max / mean seconds over servers, by the plan.
        measured_imbalance: the same, measured.
        predicted_over_measured: seconds of all servers together.
        peak_extra_gib: most memory that a fused call took beyond its tensors, in 2**30 bytes.
    """

    seed: int
    phase: str
    tasks: int
    parts: int
    median_task_tokens: int
    fused_tflops: float
    whole_tflops: float
    ratio: float
    predicted_imbalance: float
    measured_imbalance: float
    predicted_over_measured: float
    peak_extra_gib: float


class Workload:
    """Random tensors of one shape on one device."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.shape = shape
        self.device = device
        self.scale = shape.head_dim**-0.5
        self._generator = torch.Generator(device).manual_seed(0)

    def rows(self, n_rows: int, name: str) -> torch.Tensor:
        """Normal values for q, k, v or do."""
        shape = self.shape
        heads = shape.num_heads if name in ("q", "do") else shape.num_heads_kv
        dim = shape.head_dim if name in ("q", "k") else shape.head_dim_v
        return torch.empty(
            n_rows, heads, dim, dtype=getattr(torch, shape.dtype), device=self.device
        ).normal_(generator=self._generator)

    def forward_parts(self, route: TickRoute, local_rank: int, rank_rows: int) -> list[ForwardPart]:
        """A server's parts, over tensors as large as the tick's."""
        q, k, v = {}, {}, {}
        for rank, pair in route.pairs.items():
            q[rank] = self.rows(rank_rows if rank == local_rank else pair.n_q_rows, "q")
            n_kv = rank_rows if rank == local_rank else pair.n_kv_rows
            k[rank], v[rank] = self.rows(n_kv, "k"), self.rows(n_kv, "v")
        k[ASSEMBLED] = self.rows(route.n_assembled_rows, "k")
        v[ASSEMBLED] = self.rows(route.n_assembled_rows, "v")
        o = {rank: torch.empty_like(self.rows(len(rows), "do")) for rank, rows in q.items()}
        lse = {
            rank: torch.zeros(rows.shape[:2], dtype=torch.float32, device=self.device)
            for rank, rows in q.items()
        }
        return [
            ForwardPart(
                q=q[part.q_source],
                k=k[part.k_source],
                v=v[part.k_source],
                o=o[part.q_source],
                lse=lse[part.q_source],
                tasks=part.tasks,
            )
            for part in route.parts
        ]

    def backward_parts(self, parts: Sequence[ForwardPart], route: TickRoute) -> list[BackwardPart]:
        """The same parts for the backward pass, once they have run forward."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        backward = []
        for part, place in zip(parts, route.parts, strict=True):
            if place.q_source not in made:
                do = self.rows(len(part.q), "do")
                delta = (do.float() * part.o.float()).sum(-1)
                made[place.q_source] = do, delta, torch.empty_like(part.q)
            do, delta, dq = made[place.q_source]
            dk, dv = (
                torch.zeros(place.n_dk_rows, *keys.shape[1:], device=self.device)
                for keys in (part.k, part.v)
            )
            backward.append(
                BackwardPart(part.q, part.k, part.v, do, part.lse, delta, dq, dk, dv, part.tasks)
            )
        return backward


def plain_calls(
    kernel: str, load: Workload, lengths: Int64Array
) -> dict[Phase, Callable[[], object]]:
    """The library's own calls for whole documents of ``lengths``, by phase."""
    n_rows = int(lengths.sum())
    q, k, v, do = (load.rows(n_rows, name) for name in ("q", "k", "v", "do"))
    bounds = torch.tensor([*exclusive_cumsum(lengths), n_rows], dtype=torch.int32)
    cu_seqlens, longest = bounds.to(load.device), int(lengths.max())
    if kernel == "fa4":
        library: Any = importlib.import_module("flash_attn.cute.interface")
        options: dict[str, Any] = {
            "softmax_scale": load.scale,
            "causal": True,
            "cu_seqlens_q": cu_seqlens,
            "cu_seqlens_k": cu_seqlens,
            "max_seqlen_q": longest,
            "max_seqlen_k": longest,
        }

        def fa4_forward() -> Any:
            return library._flash_attn_fwd(q, k, v, return_lse=True, **options)

        o, lse, *_ = fa4_forward()
        return {
            Phase.FORWARD: fa4_forward,
            Phase.BACKWARD: lambda: library._flash_attn_bwd(q, k, v, o, do, lse, **options),
        }
    place = (cu_seqlens, cu_seqlens, longest, longest, 0.0, True)

    def fa2_forward() -> Any:
        return torch.ops.aten._flash_attention_forward(q, k, v, *place, False, scale=load.scale)

    o, lse, state, unused, _ = fa2_forward()
    return {
        Phase.FORWARD: fa2_forward,
        Phase.BACKWARD: lambda: torch.ops.aten._flash_attention_backward(
            do, q, k, v, o, lse, *place, state, unused, scale=load.scale
        ),
    }


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Median device seconds of ``call``."""
    times = []
    for repeat in range(WARM_UPS + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize(device)
        if repeat >= WARM_UPS:
            times.append(begin.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def spread(lengths: Int64Array, n_bins: int) -> list[Int64Array]:
    """Documents over bins of nearly equal work: the longest first, each to the lightest bin."""
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    work = [0] * n_bins
    for length in sorted(lengths.tolist(), reverse=True):
        lightest = work.index(min(work))
        bins[lightest].append(length)
        work[lightest] += length * (length + 1) // 2
    return [int64_column(sorted(members), "lengths") for members in bins if members]


def measure(
    plan: Plan, phase: Phase, kernel: Kernel, load: Workload, seed: int, whole_seconds: float
) -> Measurement:
    """Runs every server's parts of ``phase`` and compares with ``whole_seconds``."""
    tasks, device = plan.tasks(phase), load.device
    rank_rows = int(plan.manifest.tokens_per_rank(0).max())
    seconds, n_parts, extra = [], 0, 0
    for server in range(len(plan.servers)):
        route = derive_tick_route(plan, server, 0, phase, local_rank=server)
        forward = load.forward_parts(route, server, rank_rows)
        kernel.forward(forward, load.scale)
        call = partial(kernel.forward, forward, load.scale)
        if phase is Phase.BACKWARD:
            call = partial(kernel.backward, load.backward_parts(forward, route), load.scale)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        seconds.append(seconds_of(call, device))
        extra = max(extra, torch.cuda.max_memory_allocated(device) - held)
        n_parts += len(route.parts)
    qk_pairs = tasks.qk_pairs(plan.manifest)
    flops = load.shape.qk_flops(int(qk_pairs.sum()), phase is Phase.BACKWARD)
    forecast = plan.forecast(phase)
    fused, whole = flops / sum(seconds) / 1e12, flops / whole_seconds / 1e12
    return Measurement(
        seed=seed,
        phase=phase.value,
        tasks=len(tasks),
        parts=n_parts,
        median_task_tokens=weighted_median(tasks.q_end - tasks.q_begin, qk_pairs),
        fused_tflops=fused,
        whole_tflops=whole,
        ratio=fused / whole,
        predicted_imbalance=forecast.predicted_imbalance if forecast else float("nan"),
        measured_imbalance=max(seconds) / statistics.mean(seconds),
        predicted_over_measured=float(np.sum(forecast.seconds)) / sum(seconds)
        if forecast
        else float("nan"),
        peak_extra_gib=extra / 2**30,
    )


def weighted_median(values: Int64Array, weights: Int64Array) -> int:
    """The value at which half of the weight is reached."""
    order = np.argsort(values)
    return int(values[order][np.searchsorted(np.cumsum(weights[order]), weights.sum() / 2)])


def plan_of(
    lengths: Int64Array, n_ranks: int, profile: CostProfile, planner: str, eps: float
) -> Plan:
    """One step over in-place servers on one host."""
    servers = [
        PlanningServer(
            server=PlanServer(f"rank-{rank}", rank, f"localhost:{rank + 1}"),
            host="localhost",
            profile=profile,
        )
        for rank in range(n_ranks)
    ]
    manifest = pack_in_order(lengths, n_ranks, int(lengths.sum()) // n_ranks, 1)
    return PLANNERS[planner](manifest, servers, profile.shape, PlanningOptions(tolerance=eps))


def show(measurements: Sequence[Measurement], title: str) -> None:
    """The table."""
    table = Table(title=title)
    for column in ("seed", "phase", "tasks (parts)", "task tokens", "fused TFLOP/s"):
        table.add_column(column, justify="right")
    for column in (
        "whole TFLOP/s", "ratio", "imbalance (planned)", "seconds, planned", "extra GiB",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for m in measurements:
        table.add_row(
            str(m.seed),
            m.phase,
            f"{m.tasks} ({m.parts})",
            str(m.median_task_tokens),
            f"{m.fused_tflops:.0f}",
            f"{m.whole_tflops:.0f}",
            f"{m.ratio:.3f}",
            f"{m.measured_imbalance:.3f} ({m.predicted_imbalance:.3f})",
            f"{m.predicted_over_measured:.3f}",
            f"{m.peak_extra_gib:.2f}",
        )
    Console(width=120).print(table)


def main(
    kernel: Annotated[str | None, typer.Option(help="Kernel; by device if left out.")] = None,
    planner: Annotated[str, typer.Option(help=f"One of {sorted(PLANNERS)}.")] = "balanced",
    tokens_per_rank: Annotated[int, typer.Option(min=1024)] = 128 * 1024,
    ranks: Annotated[int, typer.Option(min=1)] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Batches, seeds from 0.")] = 3,
    lengths: Annotated[str, typer.Option(help="pretrain or prolong.")] = "pretrain",
    eps: Annotated[float, typer.Option(help="Tolerance of the plan.")] = 0.03,
    profile_seconds: Annotated[
        float, typer.Option(help="Budget of the cost profile.")
    ] = QUICK_GRIDS["cuda"].budget_seconds,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """Fused CA-tasks against whole documents, Llama-3-8B heads in bfloat16."""
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(
        num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16"
    )
    chosen = select_kernel(device, kernel)
    grid = QUICK_GRIDS["cuda"]
    profile = measure_profile(
        chosen, shape, device, grid.q_tokens, grid.kv_tokens, budget_seconds=profile_seconds
    )
    load = Workload(shape, device)
    measurements = []
    for seed in range(batches):
        drawn = sample_lengths(lengths, ranks * tokens_per_rank, tokens_per_rank, seed)
        plan = plan_of(drawn, ranks, profile, planner, eps)
        whole = dict.fromkeys(Phase, 0.0)
        for members in spread(drawn, ranks):
            for phase, call in plain_calls(chosen.name, load, members).items():
                whole[phase] += seconds_of(call, device)
        for phase in Phase:
            measurements.append(measure(plan, phase, chosen, load, seed, whole[phase]))
            assert int(plan.tasks(phase).qk_pairs(plan.manifest).sum()) == int(
                causal_qk_pairs(np.zeros_like(drawn), drawn).sum()
            )
    show(measurements, f"{device_name(device)}, {chosen.name}, {planner}, {lengths} lengths")
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(m) for m in measurements], indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
