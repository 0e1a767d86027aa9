"""A picture of one step of a pipeline in several ways, from what the benchmark wrote."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distca.apps.report.style import BLUE, GREEN, ORANGE, PURPLE, figure_style

KINDS = {
    "F": ("forward", BLUE),
    "B": ("backward", GREEN),
    "I": ("backward, inputs", GREEN),
    "W": ("backward, weights", ORANGE),
}
"""Names and colours of actions."""
SERVED = ("core attention that the rank runs", PURPLE)
_NUMBERED_SHARE = 0.012
"""Actions shorter than this part of the picture have no number."""


def save_pipelines(cases: Sequence[dict[str, Any]], title: str, path: Path) -> None:
    """Writes the picture of the first measured step of each of ``cases`` as PNG to ``path``.

    Raises:
        ValueError: none has a step.
    """
    with figure_style():
        draw_pipelines(cases, title).savefig(path)


def draw_pipelines(cases: Sequence[dict[str, Any]], title: str) -> Figure:
    """A part for each case, a row for each rank: its actions with their microbatches, and below
    them when its server ran core attention, if it has one.

    Raises:
        ValueError: none has a step.
    """
    drawn = [case for case in cases if case["steps"]]
    if not drawn:
        raise ValueError("no way has a step that can be drawn")
    n_ranks = len(drawn[0]["steps"][0]["ranks"])
    height = 0.8 + len(drawn) * (0.55 + 0.42 * n_ranks)
    figure = Figure(figsize=(11, height), layout="constrained")
    parts = figure.subplots(len(drawn), sharex=True, squeeze=False)[:, 0]
    end = max(case["steps"][0]["seconds"] for case in drawn)
    kinds: dict[str, str] = {}
    for case, axes in zip(drawn, parts, strict=True):
        kinds |= _draw_step(axes, case, end)
    parts[0].set_xlim(0, end)
    parts[-1].set_xlabel("time in the step (s)")
    figure.suptitle(title, x=0.01, ha="left", fontweight="bold", fontsize=11)
    figure.legend(
        handles=[Patch(color=colour, label=name) for name, colour in kinds.items()],
        loc="outside lower center",
        ncols=len(kinds),
    )
    return figure


def _draw_step(axes: Axes, case: dict[str, Any], end: float) -> dict[str, str]:
    """Draws the first step of a case; returns the names and colours of what it has."""
    step, kinds = case["steps"][0], dict[str, str]()
    for rank, its in enumerate(step["ranks"]):
        for _, kind, microbatch, begin, until in its["actions"]:
            name, colour = KINDS[kind]
            kinds[name] = colour
            axes.barh(
                rank - 0.1, until - begin, left=begin, height=0.55,
                color=colour, edgecolor="white", linewidth=0.5,
            )  # fmt: skip
            if until - begin > _NUMBERED_SHARE * end:
                axes.text(
                    (begin + until) / 2, rank - 0.1, str(microbatch),
                    color="white", fontsize=7, ha="center", va="center",
                )  # fmt: skip
        kernels = its["served"].get("kernels", [])
        if kernels:
            name, colour = SERVED
            kinds[name] = colour
            spans = [(begin, until - begin) for begin, until in kernels]
            axes.broken_barh(spans, (rank + 0.2, 0.18), color=colour)
    axes.set_yticks(range(len(step["ranks"])), [f"rank {r}" for r in range(len(step["ranks"]))])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.set_title(f"{case['way']}: {step['seconds']:.2f} s")
    return kinds
