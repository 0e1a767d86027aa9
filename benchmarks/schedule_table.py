"""Pipeline schedules with and without disaggregation: the tables of docs/simulator.md.

``python -m benchmarks.schedule_table`` (five minutes of one core) writes them into the page.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.paper_table import DOCUMENT, replace_between, shipped_profile
from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from core_attention.schedule_orders import SCHEDULES
from distca.simulator.baselines import balanced_seconds
from distca.simulator.cluster import ClusterSpec
from distca.simulator.disaggregated import Method, disaggregated_step
from distca.simulator.lengths import sample_lengths
from distca.simulator.model import preset
from distca.simulator.schedules import EVEN, IDLE_AWARE, ScheduleTimes, compare_schedules
from distca.simulator.setup import Setup

K = 1024
METHOD = Method(planner=balanced.plan, options=PlanningOptions())
NAMES = tuple(SCHEDULES)
POOLED = "same-phase", "1f1b", "1f1b-split", "zero-bubble"
"""Of those, the ones of a stage a rank."""

ENDLESS_BYTES_PER_SECOND = 1e18
EQUAL_DOCUMENT = 8 * K
SIZES = ((2, 4), (4, 4), (4, 8), (4, 16), (8, 16))
RATIOS = (1.0, 0.5, 0.35)


@dataclass(frozen=True)
class Cluster:
    """Where documents are trained.

    Attributes:
        name: for the table.
        n_gpus, tensor_parallel, gpus_per_host: of the job.
    """

    name: str
    n_gpus: int
    tensor_parallel: int
    gpus_per_host: int


CLUSTERS = (
    Cluster("4 GPUs, one host", 4, 1, 4),
    Cluster("64 GPUs, TP 8", 64, 8, 8),
    Cluster("256 GPUs, TP 8", 256, 8, 8),
)


def formula_rows(profile: CostProfile) -> list[Sequence[str]]:
    """Equal microbatches, links without limit: gains over a perfectly balanced 1F1B."""
    rows: list[Sequence[str]] = []
    for n_stages, n_microbatches in SIZES:
        for ratio in RATIOS:
            setup = _with_ratio(profile, n_stages, n_microbatches, ratio)
            lengths = _equal_documents(setup)
            unit = balanced_seconds(setup, lengths)
            gains = [unit / balanced_seconds(setup, lengths, SCHEDULES["zero-bubble"])]
            for name in POOLED:
                for idle_aware in (False, True):
                    method = replace(METHOD, schedule=SCHEDULES[name], idle_aware=idle_aware)
                    gains.append(unit / disaggregated_step(setup, lengths, method).seconds)
            sizes = f"{n_stages}, {n_microbatches}", f"{ratio:g}"
            rows.append((*sizes, *(f"{gain:.2f}" for gain in gains)))
    return rows


def _with_ratio(profile: CostProfile, n_stages: int, n_microbatches: int, ratio: float) -> Setup:
    """Attention of a microbatch takes ``ratio`` times its linear part."""
    setup = Setup(
        model=replace(preset("llama-3-8b"), n_layers=96),
        cluster=ClusterSpec(
            n_gpus=n_stages,
            tensor_parallel=1,
            gpus_per_host=n_stages,
            gpu_bandwidth_bytes_per_second=ENDLESS_BYTES_PER_SECOND,
            host_bandwidth_bytes_per_second=ENDLESS_BYTES_PER_SECOND,
            message_latency_seconds=0.0,
        ),
        profile=profile,
        tokens_per_rank=256 * K,
        n_stages=n_stages,
        n_microbatches=n_microbatches,
    )

    def with_rate(flops_per_second: float) -> Setup:
        cluster = replace(setup.cluster, linear_flops_per_second=flops_per_second)
        return replace(setup, cluster=cluster)

    lengths = _equal_documents(setup)
    rate = setup.cluster.linear_flops_per_second
    # Seconds are attention plus linear work over the rate: two rates give both.
    fast, slow = (balanced_seconds(with_rate(r), lengths) for r in (2 * rate, rate))
    linear = 2 * (slow - fast)
    return with_rate(rate * linear * ratio / (slow - linear))


def _equal_documents(setup: Setup) -> Int64Array:
    return np.full(setup.step_tokens // EQUAL_DOCUMENT, EQUAL_DOCUMENT)


def document_rows(profile: CostProfile, n_batches: int) -> list[Sequence[str]]:
    """Real lengths and links: step time of every schedule / 1F1B with equal microbatches."""
    rows: list[Sequence[str]] = []
    for cluster in CLUSTERS:
        for distribution in ("pretrain", "prolong"):
            for n_microbatches in (4, 8):
                setup = Setup(
                    model=preset("llama-3-8b"),
                    cluster=ClusterSpec(
                        n_gpus=cluster.n_gpus,
                        tensor_parallel=cluster.tensor_parallel,
                        gpus_per_host=cluster.gpus_per_host,
                    ),
                    profile=profile,
                    tokens_per_rank=128 * K,
                    n_stages=4,
                    n_microbatches=n_microbatches,
                    recompute_linear=True,
                )
                batches = [
                    np.asarray(
                        sample_lengths(distribution, setup.step_tokens, setup.tokens_per_rank, seed)
                    )
                    for seed in range(n_batches)
                ]
                found = compare_schedules(setup, batches, METHOD, SCHEDULES)
                unit = found.balanced_1f1b_seconds
                job = f"{cluster.name}; {distribution}; m = {n_microbatches}"
                rows.append((job, *(_cell(times, unit) for times in found.times)))
    return rows


def _cell(times: ScheduleTimes, unit: float) -> str:
    even, aware = (times.pooled[spread].seconds / unit for spread in (EVEN, IDLE_AWARE))
    alone = min(times.plain_seconds, times.repacked_seconds) / unit
    return f"{alone:.2f} / {even:.2f} / {aware:.2f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, default=5)
    parser.add_argument("--dry-run", action="store_true", help="print, and leave docs/ as it is")
    arguments = parser.parse_args()
    profile = shipped_profile()
    pooled = [f"{name}, {spread}" for name in POOLED for spread in (EVEN, IDLE_AWARE)]
    parts = {
        "schedule formula": table(
            ("p, m", "a / l", "zero-bubble without CAD", *pooled), formula_rows(profile)
        ),
        "schedule documents": table(("job", *NAMES), document_rows(profile, arguments.batches)),
    }
    if arguments.dry_run:
        print("\n\n".join(parts.values()))
        return
    text = DOCUMENT.read_text()
    for name, content in parts.items():
        text = replace_between(text, name, content)
    DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
