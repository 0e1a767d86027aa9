"""The loss of a small model over some steps, with DistCA in place and with local attention.

Both train on the same documents from the same weights. The picture shows both losses and how far
they are apart; numerically different sums of dK and dV are all that can tell them apart.

    python -m benchmarks.gpu.loss_tracking --device cpu --ranks 2 --json loss.json --png loss.png
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.gpu.end_to_end import Plan, measure
from benchmarks.gpu.training.stack import ModelShape
from core_attention.arrays import Float64Array


def draw(local: Float64Array, served: Float64Array, title: str, path: Path) -> None:
    """Both losses, and below them their relative difference, by step."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    losses, difference = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    losses.plot(local, label="local attention", color="tab:gray", linewidth=3)
    losses.plot(served, label="DistCA in place", color="tab:blue", linestyle="--")
    losses.set_ylabel("loss")
    losses.set_title(title)
    losses.legend()
    difference.semilogy(np.maximum(np.abs(served / local - 1), 1e-9), color="tab:blue")
    difference.set_ylabel("relative\ndifference")
    difference.set_xlabel("step")
    figure.savefig(path, dpi=110)


def main(
    steps: Annotated[int, typer.Option(min=2)] = 50,
    ranks: Annotated[int, typer.Option(help="GPUs, or processes on a CPU.")] = 4,
    tokens_per_rank: Annotated[int, typer.Option(help="Also the longest document.")] = 2048,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    json_path: Annotated[Path | None, typer.Option("--json")] = None,
    png_path: Annotated[Path | None, typer.Option("--png")] = None,
) -> None:
    """Losses with DistCA and with local attention."""
    model = ModelShape(
        layers=4, hidden=128, feed_forward=352, heads=4, kv_heads=2, vocabulary=512, dtype=dtype
    )
    plan = Plan(
        model=model,
        tokens_per_rank=tokens_per_rank,
        ranks=ranks,
        # One batch again and again: random tokens can only be learnt by heart.
        seeds=(0,) * steps,
        warm_ups=0,
        ways=("plain", "disaggregated"),
        distribution="pretrain",
        tolerance=0.03,
        device=device,
        compiled=False,
        traced=(),
        learning_rate=1e-3,
    )
    local, served = (
        np.array([step["loss"] for step in result["steps"]]) for result in measure(plan)
    )
    apart = np.abs(served / local - 1)
    print(
        f"loss {local[0]:.4f} to {local[-1]:.4f} (local), {served[-1]:.4f} (served); apart by "
        f"{apart.max():.1e} at most, {apart.mean():.1e} in the mean"
    )
    if json_path is not None:
        found = {"local": local.tolist(), "served": served.tolist()}
        json_path.write_text(json.dumps(found, indent=1) + "\n")
    if png_path is not None:
        draw(local, served, f"{steps} steps on {ranks} ranks, {dtype}, {device}", png_path)


if __name__ == "__main__":
    typer.run(main)
