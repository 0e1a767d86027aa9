"""The figures of an offline plan and of a simulation, drawn without a display."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from core_attention.arrays import Float64Array
from core_attention.plan import imbalance
from distca.apps.preview.sections import CAD, relative_steps
from distca.apps.report.style import BLUE, GREY, INK, ORANGE, figure_style
from distca.apps.simulator.comparison import PLAIN, REPACKED, SHARED, Comparison
from distca.apps.simulator.offline import OfflineBatch
from distca.process.plain_text import figure_text

_MILLI, _MEGA = 1e3, 1e6
_MANY = 40
"""From this many servers on, bars become a line and labels are thinned out."""

_THIN: dict[str, Any] = {"marker": "s", "markersize": 4}
_LINES: dict[str, dict[str, Any]] = {
    PLAIN: {"color": GREY, **_THIN},
    REPACKED: {"color": "#5B5B5B", **_THIN},
    SHARED: {"color": ORANGE, **_THIN},
    CAD: {"color": BLUE, "linewidth": 2.6, "marker": "o"},
}


def draw_plan(batch: OfflineBatch, caption: str) -> Figure:
    """Load before and after, and the bytes between ranks and servers, on one page; ``caption``
    says which batch and layout it shows."""
    with figure_style():
        figure = Figure(figsize=(10, 7.4), layout="constrained")
        figure.suptitle(figure_text(caption), fontsize=10, color=INK)
        halves: Any = figure.subfigures(2, 1, height_ratios=(1, 1.25))
        top, bottom = halves
        _draw_load(top, batch)
        left, right = bottom.subplots(1, 2, width_ratios=(1, 1.15))
        _draw_bytes(bottom, left, batch)
        _draw_steps(right, batch.comparison)
    return figure


def _draw_load(figure: FigureBase, batch: OfflineBatch) -> None:
    before, after = figure.subplots(1, 2, sharey=True)
    _draw_seconds(before, batch.before_seconds, GREY, "rank")
    before.set_title(f"Plain packing: slowest {batch.home_imbalance:.2f}x the mean")
    before.set_ylabel("attention of a layer,\nforward + backward (ms)")
    _draw_seconds(after, batch.after_seconds, BLUE, "attention server")
    after.set_title(f"Planned: {imbalance(batch.after_seconds):.2f}x")


def _draw_seconds(axes: Axes, seconds: Float64Array, colour: str, what: str) -> None:
    values = seconds * _MILLI
    if len(values) > _MANY:
        axes.fill_between(np.arange(len(values)), values, color=colour, step="mid", linewidth=0)
    else:
        axes.bar(np.arange(len(values)), values, 0.8, color=colour)
    axes.axhline(values.mean(), color=INK, linewidth=1, linestyle=":", label="mean")
    axes.set_xlabel(what)
    axes.margins(x=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_bytes(figure: FigureBase, axes: Axes, batch: OfflineBatch) -> None:
    megabytes = batch.moved_bytes / _MEGA
    has_pool = len(megabytes) > batch.plan.manifest.n_ranks
    process = "process (ranks, then pool servers)" if has_pool else "rank"
    axes.set_title("Bytes a layer, both phases (MB)")
    axes.set_xlabel(f"to {process}")
    axes.set_ylabel(f"from {process}")
    axes.grid(visible=False)
    shown = np.ma.masked_less_equal(megabytes, 0)
    if shown.count():
        top = float(shown.max())
        norm = LogNorm(vmin=max(float(shown.min()), top / 1e3), vmax=top)
        image = axes.imshow(shown, cmap="Blues", norm=norm, interpolation="nearest")
        bar = figure.colorbar(image, ax=axes, shrink=0.85, format="%g")
        bar.ax.yaxis.set_minor_formatter("{x:g}")
    else:
        axes.text(0.5, 0.5, "nothing moves", ha="center", transform=axes.transAxes)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))


def _draw_steps(axes: Axes, comparison: Comparison) -> None:
    steps = relative_steps(comparison)
    names = [name.replace(", ", ",\n") for name in steps]
    colours = [BLUE if name == CAD else GREY for name in steps]
    bars = axes.barh(names, list(steps.values()), color=colours)
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_title("Step time (1.0: perfect balance)")
    axes.grid(visible=False)
    axes.margins(x=0.14)


def draw_comparisons(comparisons: Sequence[Comparison], title: str) -> Figure:
    """Step time over GPUs, relative to perfect balance, one line a method."""
    with figure_style():
        figure = Figure(figsize=(8.6, 4.6), layout="constrained")
        axes = figure.subplots()
        gpus = [comparison.n_gpus for comparison in comparisons]
        steps = [relative_steps(comparison) for comparison in comparisons]
        for name, style in _LINES.items():
            axes.plot(gpus, [step[name] for step in steps], label=name, **style)
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(n) for n in gpus])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.set_ylabel("step time / perfect balance")
        axes.set_title(figure_text(title))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
