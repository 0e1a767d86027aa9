"""The figures of an offline plan and of a simulation, drawn without a display."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from core_attention.arrays import Float64Array
from core_attention.plan import imbalance
from distca.preview.sections import relative_step
from distca.process.plain_text import figure_text
from distca.report.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, SKY, figure_style
from distca.simulator.comparison import BASELINES, Comparison
from distca.simulator.offline import PlannedBatch

_MILLI, _MEGA = 1e3, 1e6
_MANY = 40
"""From this many servers on, bars become a line and labels are thinned out."""


def draw_plan(batch: PlannedBatch, caption: str) -> Figure:
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
        _draw_steps(right, batch)
    return figure


def _draw_load(figure: FigureBase, batch: PlannedBatch) -> None:
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


def _draw_bytes(figure: FigureBase, axes: Axes, batch: PlannedBatch) -> None:
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


def _draw_steps(axes: Axes, batch: PlannedBatch) -> None:
    rows = (
        ("plain packing", batch.plain_seconds, GREY),
        ("re-packing documents", batch.repacked_seconds, GREY),
        ("+ context parallel", batch.context_parallel_seconds, GREY),
        ("+ gather hidden,\n1.2x tokens", batch.hidden_gather_seconds, GREY),
        ("CAD", batch.disaggregated_seconds, BLUE),
    )
    relative = [seconds / batch.balanced_seconds for _, seconds, _ in rows]
    bars = axes.barh([name for name, *_ in rows], relative, color=[row[2] for row in rows])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.axvline(1.0, color=INK, linewidth=1, linestyle=":")
    axes.set_title("Step time (1.0: perfect balance)")
    axes.grid(visible=False)
    axes.margins(x=0.14)


def draw_comparisons(comparisons: Sequence[Comparison], title: str) -> Figure:
    """Step time over GPUs, relative to perfect balance, one line per method."""
    with figure_style():
        figure = Figure(figsize=(8.6, 4.6), layout="constrained")
        axes = figure.subplots()
        gpus = [comparison.n_gpus for comparison in comparisons]
        for name, style in _line_styles(comparisons[0]).items():
            axes.plot(
                gpus,
                [relative_step(c, name) for c in comparisons],
                label=figure_text(name),
                **style,
            )
        axes.axhline(1.0, color=INK, linewidth=1, linestyle=":")
        axes.set_xscale("log", base=2)
        axes.set_xticks(gpus, [str(n) for n in gpus])
        axes.minorticks_off()
        axes.set_xlabel("GPUs")
        axes.set_ylabel("step time / perfect balance")
        axes.set_title(figure_text(title))
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _line_styles(comparison: Comparison) -> Mapping[str, dict[str, Any]]:
    """Baselines thin in their colours, those with more memory dashed; methods bold."""
    styles: dict[str, dict[str, Any]] = {}
    shades = {"plain": GREY, "re-packing": "#5B5B5B", "WLB": ORANGE, "hidden": PURPLE}
    for name in BASELINES:
        if name in comparison.baseline_seconds:
            colour = next(shade for start, shade in shades.items() if name.startswith(start))
            dashes = "--" if "1.2x" in name else "-"
            styles[name] = {"color": colour, "linestyle": dashes, "marker": "s", "markersize": 4}
    for name, colour in zip(comparison.disaggregated, (BLUE, GREEN, SKY), strict=False):
        styles[name] = {"color": colour, "linewidth": 2.6, "marker": "o"}
    return styles
