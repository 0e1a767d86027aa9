"""Draws the figures of ``docs/planner.md`` from what ``benchmarks.planner`` measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # before pyplot: there is no display

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from core_attention.arrays import Float64Array

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


def draw_loads(seconds: Mapping[str, Float64Array], mean: float, path: Path) -> None:
    """Busy seconds of every server in one step, by the name of its plan, over their mean."""
    figure, axes = plt.subplots(figsize=(6.4, 3.2))
    for label, taken in seconds.items():
        axes.step(np.arange(len(taken)), np.sort(taken)[::-1] / mean, label=label, where="mid")
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
