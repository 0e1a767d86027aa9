"""A stack of transformer layers in place, three ways, as in the paper (section 6.3):

* full: DistCA as it is;
* signal: the same schedule, but messages have one byte;
* single stream: without ping-pong, one nano-batch after the other.

    python -m benchmarks.gpu.layer_stack --json layer_stack.json

What full takes over signal is what moving the data costs; what single stream takes over full is
what ping-pong hides.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.gpu.end_to_end import Plan, measure
from benchmarks.gpu.training.stack import ModelShape
from core_attention.profiling import device_name

WAYS = {"disaggregated": "full", "signal": "signal", "single-stream": "single stream"}
VOCABULARY = 1024
"""So small that the output head takes no time."""


def main(
    layers: Annotated[int, typer.Option(help="Of the Llama-3-8B shape.")] = 4,
    tokens_per_rank: Annotated[int, typer.Option(help="Also the longest document.")] = 128 * 1024,
    ranks: Annotated[int, typer.Option(help="GPUs.")] = 4,
    batches: Annotated[int, typer.Option(min=1, help="Measured; seeds from 0.")] = 3,
    warm_ups: Annotated[int, typer.Option(min=0)] = 2,
    lengths: Annotated[str, typer.Option(help="pretrain or prolong.")] = "pretrain",
    eps: Annotated[float, typer.Option(help="Tolerance of the plan.")] = 0.03,
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
) -> None:
    """A layer stack: full, signal and single stream."""
    plan = Plan(
        model=ModelShape(layers=layers, vocabulary=VOCABULARY),
        tokens_per_rank=tokens_per_rank,
        ranks=ranks,
        seeds=tuple(range(batches)),
        warm_ups=warm_ups,
        ways=tuple(WAYS),
        distribution=lengths,
        tolerance=eps,
        device="cuda",
        compiled=True,
        traced=(),
    )
    results = {result["way"]: result for result in measure(plan)}
    seconds = {
        way: np.array([step["seconds"] for step in result["steps"]])
        for way, result in results.items()
    }
    table = Table(title=f"{ranks} x {device_name(torch.device('cuda'))}, {layers} layers")
    for column in ("way", "step s by batch", "over signal"):
        table.add_column(column, justify="left" if column == "way" else "right")
    for way, taken in seconds.items():
        over = (taken / seconds["signal"]).mean() if "signal" in seconds else float("nan")
        table.add_row(WAYS[way], " ".join(f"{s:.3f}" for s in taken), f"{over:.3f}")
    Console(width=120).print(table)
    if json_path is not None:
        found = {"plan": asdict(plan), "ways": list(results.values())}
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
