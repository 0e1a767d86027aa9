"""How good the plans are, and how long they take: the balanced planner against the paper's greedy.

    python -m benchmarks.planner --output planner.json
    python -m benchmarks.planner --quick
    python -m benchmarks.planner --only "T=128K Lmax=128K n=512 "
    python -m benchmarks.planner --pipelines

Steps are drawn from the two length distributions of ``distca plan``; loads come from the
H200 profile. With ``Lmax <= T`` a document is cut at the end of a rank and goes on as a new
one, as ordinary packing does; with ``Lmax > T`` it spans ranks. Bytes are of the forward pass of
one layer: Q and O of every row that moves, K and V once per destination (log-sum-exp left out).
Times are CPU seconds of one core for the whole call, from the manifest to the checked plan with
forecasts.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks import greedy, planner_pipelines
from control_plane.planner import balanced
from control_plane.planner.forecast import row_bytes
from control_plane.planner.homes import plan_homes
from control_plane.planner.planning import Planner, PlanningOptions, PlanningServer
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest
from core_attention.plan import Plan, PlanServer
from core_attention.routing import derive_routes
from distca.apps.simulator.lengths import sample_lengths

K = 1024
PROFILE = Path(__file__).parents[1] / "distca/apps/simulator/profiles/h200-llama3-8b.json"
GREEDY_TOLERANCE = 0.1
SMALLEST_TOLERANCE = 0.02
MOST_SERVERS_WITH_PAIRS = 512
"""Bytes per pair of processes are counted up to this many servers."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kind of step: lengths from ``name``, ``n`` ranks of ``tokens``, documents up to
    ``longest``."""

    name: str
    tokens: int
    longest: int
    n: int
    seeds: int

    def __str__(self) -> str:
        return f"{self.name} T={self.tokens // K}K Lmax={self.longest // K}K n={self.n}"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one step gave. Imbalances are the worse of forward and backward; gigabytes are of the
    forward pass of one layer, in total and because of the busiest rank's rows. NaN: not measured.

    ``same``: at the greedy's tolerance; ``equal``: at the imbalance that the greedy reached in the
    forward pass; ``homes``: the same with planned homes.
    """

    home_imbalance: float
    greedy_imbalance: float
    greedy_gb: float
    greedy_busiest_gb: float
    greedy_seconds: float
    same_imbalance: float
    same_gb: float
    same_busiest_gb: float
    smallest_imbalance: float
    smallest_gb: float
    equal_gb: float
    equal_busiest_gb: float
    homes_imbalance: float
    homes_gb: float
    homes_busiest_gb: float
    seconds: float


def cases(quick: bool, seeds: int) -> Iterator[Case]:
    """The steps to plan."""
    shapes = [(128 * K, 128 * K), (64 * K, 512 * K)]
    sizes = [4, 8, 64] if quick else [4, 8, 64, 512]
    if not quick:
        shapes += [(64 * K, 64 * K), (512 * K, 512 * K), (1024 * K, 1024 * K), (128 * K, 512 * K)]
    for tokens, longest in shapes:
        for n in sizes:
            for name in ("pretrain", "prolong"):
                yield Case(name=name, tokens=tokens, longest=longest, n=n, seeds=seeds)
    if not quick:
        for name in ("pretrain", "prolong"):
            yield Case(name=name, tokens=128 * K, longest=128 * K, n=4096, seeds=min(seeds, 5))


def draw(case: Case, seed: int) -> Manifest:
    """A step of ``case``: documents in a stream, rank after rank."""
    lengths = sample_lengths(case.name, case.n * case.tokens, case.longest, seed)
    return in_a_row(lengths, case.n, case.tokens, spans=case.longest > case.tokens, step=seed)


def in_a_row(lengths: Int64Array, n: int, tokens: int, *, spans: bool, step: int = 0) -> Manifest:
    """Documents one after another, rank after rank, the last ranks with less or nothing. One that
    meets the end of a rank goes on on the next one, as the same where it ``spans``."""
    end = np.cumsum(lengths)
    tokens = min(tokens, -(-int(end[-1]) // n))
    piece_end = np.union1d(end, np.minimum(np.arange(1, n + 1) * tokens, end[-1]))
    piece_begin = np.concatenate([[0], piece_end[:-1]])
    rank = piece_begin // tokens
    if spans:
        document = np.searchsorted(end, piece_begin, side="right")
        offset = piece_begin - (end - lengths)[document]
    else:
        document, offset = np.arange(len(rank)), np.zeros_like(rank)
        lengths = piece_end - piece_begin
    return Manifest(
        step=step,
        n_ranks=n,
        n_nano_batches=1,
        document_id=np.arange(len(lengths)),
        document_length=lengths,
        document_nano_batch=np.zeros_like(lengths),
        segment_document=document,
        segment_offset=offset,
        segment_length=piece_end - piece_begin,
        segment_rank=rank,
        segment_row=piece_begin - rank * tokens,
    )


def servers_of(n: int, profile: CostProfile) -> list[PlanningServer]:
    """An in-place server for each of ``n`` ranks, each on a host of its own."""
    return [
        PlanningServer(server=PlanServer(f"rank-{i}", i, ""), host=f"host-{i}", profile=profile)
        for i in range(n)
    ]


@dataclass(frozen=True)
class Planned:
    """A plan, and the CPU seconds it took."""

    plan: Plan
    seconds: float

    @classmethod
    def by(
        cls, planner: Planner, manifest: Manifest, servers: list[PlanningServer], tolerance: float
    ) -> Planned:
        shape, options = servers[0].profile.shape, PlanningOptions(tolerance=tolerance)
        begin = time.process_time()
        plan = planner(manifest, servers, shape, options)
        return cls(plan, time.process_time() - begin)

    def imbalance(self, phase: Phase) -> float:
        forecast = self.plan.forecast(phase)
        assert forecast is not None
        return forecast.predicted_imbalance

    @property
    def worst_imbalance(self) -> float:
        return max(self.imbalance(phase) for phase in Phase)

    def moved_gb(self, servers: list[PlanningServer]) -> float:
        """Q, O, K and V of the forward pass of one layer."""
        shape, forecast = servers[0].profile.shape, self.plan.forward_forecast
        assert forecast is not None
        q_rows = forecast.bytes_out.sum() / (shape.o_row_bytes + shape.lse_row_bytes)
        return float(forecast.bytes_in.sum() + q_rows * shape.o_row_bytes) / 1e9

    def busiest_gb(self, servers: list[PlanningServer]) -> float:
        """Most gigabytes that travel because of one rank's rows, both ways."""
        if len(servers) > MOST_SERVERS_WITH_PAIRS:
            return math.nan
        per_row = row_bytes(servers[0].profile.shape, Phase.FORWARD)
        moved = np.zeros(self.plan.manifest.n_ranks)
        for (rank, at), route in derive_routes(self.plan.manifest, self.plan.forward, 0).items():
            if servers[at].server.in_place_rank != rank:
                moved[rank] += route.n_q_rows * (per_row.q_request + per_row.q_reply)
                moved[rank] += route.n_kv_rows * per_row.kv_request
        return float(moved.max()) / 1e9


def measure(case: Case, seed: int, profile: CostProfile) -> Measurement:
    """Plans one step in every way."""
    manifest, servers = draw(case, seed), servers_of(case.n, profile)
    base = Planned.by(greedy.plan, manifest, servers, GREEDY_TOLERANCE)
    same = Planned.by(balanced.plan, manifest, servers, GREEDY_TOLERANCE)
    smallest = Planned.by(balanced.plan, manifest, servers, SMALLEST_TOLERANCE)
    reached = max(base.imbalance(Phase.FORWARD) - 1, 0.0)
    equal = Planned.by(balanced.plan, manifest, servers, reached)
    homes = None
    if case.longest <= case.tokens and case.n <= MOST_SERVERS_WITH_PAIRS:
        options = PlanningOptions(tolerance=reached)
        packed = plan_homes(manifest.document_length, case.n, case.tokens, servers, options)
        homes = Planned.by(balanced.plan, Manifest.merge(packed, case.n), servers, reached)
    assert base.plan.forward_forecast is not None
    return Measurement(
        home_imbalance=base.plan.forward_forecast.home_imbalance,
        greedy_imbalance=base.worst_imbalance,
        greedy_gb=base.moved_gb(servers),
        greedy_busiest_gb=base.busiest_gb(servers),
        greedy_seconds=base.seconds,
        same_imbalance=same.worst_imbalance,
        same_gb=same.moved_gb(servers),
        same_busiest_gb=same.busiest_gb(servers),
        smallest_imbalance=smallest.worst_imbalance,
        smallest_gb=smallest.moved_gb(servers),
        equal_gb=equal.moved_gb(servers),
        equal_busiest_gb=equal.busiest_gb(servers),
        homes_imbalance=math.nan if homes is None else homes.imbalance(Phase.FORWARD),
        homes_gb=math.nan if homes is None else homes.moved_gb(servers),
        homes_busiest_gb=math.nan if homes is None else homes.busiest_gb(servers),
        seconds=max(same.seconds, smallest.seconds),
    )


def summary(measurements: list[Measurement]) -> dict[str, tuple[float, float]]:
    """Mean and worst of every field."""
    fields = {name: [getattr(m, name) for m in measurements] for name in asdict(measurements[0])}
    return {name: (float(np.mean(v)), float(np.max(v))) for name, v in fields.items()}


def report(console: Console, rows: list[tuple[Case, dict[str, tuple[float, float]]]]) -> None:
    """A table: bytes relative to the greedy's in all steps together, and the worst imbalances."""
    table = Table(title="balanced planner; bytes relative to the paper's greedy")
    for column in (
        "step", "at home", "greedy (worst)", "worst at 0.1", "worst at 0.02", "bytes, same eps",
        "bytes, equal", "busiest, same eps", "busiest, equal", "homes", "homes busiest",
        "ms (worst)",
    ):  # fmt: skip
        table.add_column(column, justify="left" if column == "step" else "right")
    for case, values in rows:
        mean, worst = ({name: v[i] for name, v in values.items()} for i in (0, 1))
        shares = [
            mean[name] / mean[base] if mean[base] else math.nan
            for name, base in (
                ("same_gb", "greedy_gb"),
                ("equal_gb", "greedy_gb"),
                ("same_busiest_gb", "greedy_busiest_gb"),
                ("equal_busiest_gb", "greedy_busiest_gb"),
                ("homes_gb", "greedy_gb"),
                ("homes_busiest_gb", "greedy_busiest_gb"),
            )
        ]
        table.add_row(
            str(case),
            f"{mean['home_imbalance']:.2f}",
            f"{mean['greedy_imbalance']:.3f} ({worst['greedy_imbalance']:.2f})",
            f"{worst['same_imbalance']:.3f}",
            f"{worst['smallest_imbalance']:.3f}",
            *(f"{share:.3f}" for share in shares),
            f"{mean['seconds'] * 1e3:.1f} ({worst['seconds'] * 1e3:.1f})",
        )
    console.print(table)


def main(
    output: Annotated[Path | None, typer.Option(help="Where to write the figures as JSON.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Steps of each kind.")] = 20,
    quick: Annotated[bool, typer.Option(help="A few small kinds of steps, in a minute.")] = False,
    only: Annotated[str, typer.Option(help="Only kinds that contain it, as 'n=512'.")] = "",
    pipelines: Annotated[
        bool, typer.Option(help="Only how long steps of pipelines take to plan.")
    ] = False,
) -> None:
    """Plans steps of many kinds with both planners and compares them."""
    console = Console(width=200)
    if pipelines:
        planner_pipelines.report(console)
        return
    profile = CostProfile.load(PROFILE)
    measure(Case(name="pretrain", tokens=64 * K, longest=64 * K, n=4, seeds=1), 0, profile)
    rows = []
    kinds = cases(quick, min(seeds, 5) if quick else seeds)
    chosen = [case for case in kinds if only in f"{case} "]
    if not chosen:
        raise typer.BadParameter(f"no kind of step contains {only!r}")
    for case in track(chosen, console=console, description="planning"):
        rows.append((case, summary([measure(case, seed, profile) for seed in range(case.seeds)])))
        if output is not None:
            records = [asdict(done) | {"results": values} for done, values in rows]
            output.write_text(json.dumps(records, indent=1))
    report(console, rows)


if __name__ == "__main__":
    typer.run(main)
