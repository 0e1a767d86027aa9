"""The figures of a report. Each function draws one from a record, without a display."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from core_attention.plan import imbalance
from distca.apps.report.record import RunRecord, StepDetail
from distca.apps.report.style import BLUE, GREY, INK, ORANGE, figure_style, whole_steps
from distca.process.plain_text import figure_text

MILLI = 1e3


def draw_figures(record: RunRecord) -> dict[str, Figure]:
    """All figures that ``record`` has the data for, by name, in the order of the report."""
    drawers: dict[str, Callable[[], Figure]] = {"loss": lambda: draw_loss(record)}
    if any(step.home_imbalance is not None for step in record.steps):
        drawers["imbalance"] = lambda: draw_imbalance(record)
    if (detail := record.detail) is not None:
        drawers["load"] = lambda: draw_load(detail)
    with figure_style():
        return {name: draw() for name, draw in drawers.items()}


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Writes each figure as ``<name>.png`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    with figure_style():
        for name, figure in figures.items():
            figure.savefig(folder / f"{name}.png")


def draw_loss(record: RunRecord) -> Figure:
    """Loss over steps."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    steps = [step.step for step in record.steps]
    losses = [step.loss for step in record.steps]
    axes.plot(steps, losses, color=BLUE, marker="o", markersize=4, linewidth=1.8)
    for index in {0, len(steps) - 1} if steps else ():
        axes.annotate(
            f"{losses[index]:.3f}",
            (steps[index], losses[index]),
            xytext=(0, 7),
            textcoords="offset points",
            ha="center",
        )
    axes.margins(y=0.15)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title("Training loss")
    whole_steps(axes)
    return figure


def draw_imbalance(record: RunRecord) -> Figure:
    """Imbalance over steps: at home, as planned and as measured."""
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots()
    series = (
        ("without planning (predicted)", "home_imbalance", GREY, "s"),
        ("planned (predicted)", "planned_imbalance", BLUE, "o"),
        ("planned (measured)", "measured_imbalance", ORANGE, "^"),
    )
    for label, field, colour, marker in series:
        known = [(s.step, getattr(s, field)) for s in record.steps if getattr(s, field) is not None]
        if known:
            x, y = zip(*known, strict=True)
            axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=1.6, label=label)
    axes.axhline(1.0, color=INK, linewidth=0.8, linestyle=":")
    axes.set_ylabel("slowest server / mean")
    axes.set_title("Imbalance of core attention (1.0 is perfect)")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.22), ncols=3, borderaxespad=0)
    whole_steps(axes)
    return figure


def draw_load(detail: StepDetail) -> Figure:
    """Kernel seconds at home, and per server as planned and as measured."""
    figure = Figure(figsize=(8.5, 3.6), layout="constrained")
    before, after = figure.subplots(
        1, 2, sharey=True, width_ratios=(1 + len(detail.home_seconds), 2 * len(detail.servers))
    )
    home = np.array(detail.home_seconds) * MILLI
    _bars(before, home, 0.0, 0.55, GREY, "predicted")
    before.set_xticks(range(len(home)), [f"rank {rank}" for rank in range(len(home))])
    before.set_ylabel("kernel time in the step (ms)")
    before.set_title(f"Without planning (imbalance {imbalance(home):.2f})")
    planned = np.array(detail.planned_seconds) * MILLI
    measured = np.array(detail.measured_seconds) * MILLI
    shift = 0.2 if measured.size else 0.0
    _bars(after, planned, -shift, 0.38, BLUE, "predicted")
    title = f"Planned ({imbalance(planned):.2f} predicted"
    if measured.size:
        _bars(after, measured, shift, 0.38, ORANGE, "measured")
        title += f", {imbalance(measured):.2f} measured"
    after.set_xticks(range(len(detail.servers)), _servers(detail))
    after.set_title(title + ")")
    after.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, borderaxespad=0)
    return figure


def _servers(detail: StepDetail) -> list[str]:
    return [figure_text(server) for server in detail.servers]


def _bars(
    axes: Axes, values: np.ndarray, shift: float, width: float, colour: str, label: str
) -> None:
    bars = axes.bar(np.arange(len(values)) + shift, values, width, color=colour, label=label)
    axes.bar_label(bars, fmt="%.0f" if values.max(initial=0) >= 10 else "%.2f", padding=2)
    axes.margins(y=0.14)
