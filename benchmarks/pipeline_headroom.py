"""How much a perfect idle-aware pipeline could gain over 1F1B on documents as they are drawn.

    python -m benchmarks.pipeline_headroom
    python -m benchmarks.pipeline_headroom --stages 8 --microbatches 16 --batches 100

The batches are those of ``benchmarks.gpu.pipeline``, and more of their kind. 1F1B waits for its
neighbours as in the simulator; the other step is the formula, with attention divided at will, no
message and no time between kernels. So the ratio is the most that any plan could reach: over
documents as they come, over the packed microbatches of ``benchmarks.gpu.pipeline``, and over
microbatches that all take equally long, which no packing of whole documents reaches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.gpu.training.batches import Batch
from benchmarks.gpu.training.methods import PROFILE
from benchmarks.gpu.training.microbatches import Layout, as_drawn, draw_microbatches, evenly
from benchmarks.gpu.training.pipeline_forecast import idle_aware, one_f_one_b
from benchmarks.planner_pipelines import LAYERS, LINEAR_SECONDS, TOKENS
from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.schedule import Kind
from core_attention.schedule_orders import SCHEDULES
from distca.simulator.pipeline import schedule_seconds

PHASE_OF = {Kind.FORWARD: Phase.FORWARD, Kind.BACKWARD: Phase.BACKWARD}
LINEAR_SHARE = {Kind.FORWARD: 0.25, Kind.BACKWARD: 0.75}
"""A backward computes the forward again."""
SHOWN = 5
"""Batches that ``benchmarks.gpu.pipeline`` runs."""


def attention_seconds(
    batch: Batch, layout: Layout, profile: CostProfile
) -> dict[Kind, Float64Array]:
    """Seconds ``[n_microbatches, 1]`` of core attention in one stage, by kind of action."""
    lengths = batch.lengths
    return {
        kind: np.array(
            [
                [LAYERS * float(profile.seconds(lengths[held], lengths[held], phase).sum())]
                for held in map(list, layout)
            ]
        )
        for kind, phase in PHASE_OF.items()
    }


def gains(n_stages: int, batch: Batch, profile: CostProfile) -> tuple[float, float, float]:
    """Seconds of 1F1B on documents as drawn, packed, and in equal microbatches, each over those of
    the formula."""
    drawn = attention_seconds(batch, as_drawn(batch), profile)
    n_microbatches = len(batch.ranks)
    attention = float(sum(its.sum() for its in drawn.values())) / n_microbatches
    best = idle_aware(n_stages, n_microbatches, LINEAR_SECONDS, attention)
    equal = one_f_one_b(n_stages, n_microbatches, LINEAR_SECONDS, attention)
    packed = attention_seconds(batch, evenly(batch), profile)
    as_they_are, at_best_packed = (
        float(
            schedule_seconds(
                SCHEDULES["1f1b"](n_stages, n_microbatches),
                {kind: its[kind] + LINEAR_SHARE[kind] * LINEAR_SECONDS for kind in its},
            )[0]
        )
        for its in (drawn, packed)
    )
    return as_they_are / best, at_best_packed / best, equal / best


def main(
    stages: Annotated[int, typer.Option(min=2, help="Ranks of a pipeline.")] = 4,
    microbatches: Annotated[
        str, typer.Option(help="Of a step; several numbers, with commas, one by one.")
    ] = "4,8",
    batches: Annotated[int, typer.Option(min=1, help="Of each, by seed from 0 on.")] = 60,
) -> None:
    """Prints the mean gains over many draws, and over those that the GPU benchmark runs."""
    profile = CostProfile.load(PROFILE)
    table = Table(title=f"1F1B over a perfect idle-aware step, {stages} stages, {TOKENS} tokens")
    for column in ("microbatches", "batches", "as drawn", "packed", "equal"):
        table.add_column(column, justify="right")
    for n_microbatches in map(int, microbatches.split(",")):
        of_batch = [
            gains(
                stages,
                draw_microbatches(seed, n_microbatches, TOKENS, "pretrain", TOKENS),
                profile,
            )
            for seed in track(range(batches), description=f"{n_microbatches} microbatches")
        ]
        for n in sorted({min(SHOWN, batches), batches}):
            table.add_row(str(n_microbatches), f"0 to {n - 1}", *_means(of_batch[:n]))
    Console().print(table)


def _means(of_batch: Sequence[tuple[float, float, float]]) -> list[str]:
    """With standard errors."""
    values = np.array(of_batch)
    errors = values.std(axis=0) / np.sqrt(len(values))
    return [
        f"{mean:.3f} ± {error:.3f}" for mean, error in zip(values.mean(axis=0), errors, strict=True)
    ]


if __name__ == "__main__":
    typer.run(main)
