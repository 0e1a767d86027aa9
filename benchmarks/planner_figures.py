"""Draws the figures of ``docs/planner.md`` from what ``benchmarks.planner`` measured.

python -m benchmarks.planner_figures planner.json docs/img
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer

matplotlib.use("Agg")  # before pyplot: there is no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.planner import PROFILE, Case, Planned, draw, servers_of
from control_plane.planner import balanced, greedy
from core_attention.cost_model import CostProfile

K = 1024
COLOURS = {"pretrain": "tab:blue", "prolong": "tab:orange"}


def draw_bytes(records: list[dict[str, Any]], path: Path) -> None:
    """Bytes relative to the greedy's over the number of servers, T = Lmax = 128K."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    for name, colour in COLOURS.items():
        rows = [
            r
            for r in records
            if r["name"] == name and r["tokens"] == r["longest"] == 128 * K and r["n"] <= 512
        ]
        n = [row["n"] for row in rows]
        for field, style, label in (
            ("same_gb", "-o", "same tolerance"),
            ("equal_gb", "--s", "equal imbalance"),
            ("homes_gb", ":^", "planned homes"),
        ):
            share = [row["results"][field][0] / row["results"]["greedy_gb"][0] for row in rows]
            axes.plot(n, share, style, color=colour, label=f"{name}, {label}")
    axes.set_xscale("log", base=2)
    axes.set_ylim(0, 1)
    axes.set_xlabel("servers")
    axes.set_ylabel("bytes moved / greedy's")
    axes.legend(fontsize=7, ncols=2)
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_loads(path: Path) -> None:
    """Busy seconds of every server in one step: at home, greedy, balanced."""
    profile = CostProfile.load(PROFILE)
    case = Case(name="prolong", tokens=128 * K, longest=128 * K, n=64, seeds=1)
    manifest, servers = draw(case, 2), servers_of(case.n, profile)
    base = Planned.by(greedy.plan, manifest, servers, 0.1).plan.forward_forecast
    ours = Planned.by(balanced.plan, manifest, servers, 0.03).plan.forward_forecast
    assert base is not None
    assert ours is not None
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    mean = ours.seconds.mean()
    for seconds, label in (
        (base.home_seconds, "at home"),
        (base.seconds, "greedy, eps 0.1"),
        (ours.seconds, "balanced, eps 0.03"),
    ):
        axes.step(np.arange(case.n), np.sort(seconds[0])[::-1] / mean, label=label, where="mid")
    axes.set_yscale("log")
    axes.set_xlabel("servers, busiest first")
    axes.set_ylabel("busy seconds / mean")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_chunk(path: Path) -> None:
    """Bytes of a chunk of given work, over where it ends."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    end = np.linspace(1, 128 * K, 2000)
    for share in (0.02, 0.05, 0.1, 0.2):
        pairs = share * (128 * K) ** 2 / 2
        square = end * end - 2 * pairs
        begin = np.sqrt(np.maximum(square, 0))
        moved = np.where(square >= 0, 16384 * (end - begin) + 4096 * end, np.nan) / 1e9
        axes.plot(end / K, moved, label=f"{share:.0%} of a 128K document's pairs")
        best = np.sqrt(2 * pairs) / 0.6
        _mark(axes, best / K, (16384 * 0.2 + 4096) * best / 1e9)
    axes.set_xlabel("end of the chunk b, in K tokens")
    axes.set_ylabel("GB moved")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    _save(figure, path)


def _mark(axes: Axes, x: float, y: float) -> None:
    axes.plot([x], [y], "k.", markersize=7)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(
    figures: Annotated[Path, typer.Argument(help="What benchmarks.planner wrote.")],
    folder: Annotated[Path, typer.Argument(help="Where to draw.")],
) -> None:
    """Draws the figures of docs/planner.md."""
    folder.mkdir(parents=True, exist_ok=True)
    draw_bytes(json.loads(figures.read_text()), folder / "planner-bytes.png")
    draw_loads(folder / "planner-loads.png")
    draw_chunk(folder / "planner-chunk.png")


if __name__ == "__main__":
    typer.run(main)
