"""The timeline of one step on one rank: what each lane did, and when."""

from __future__ import annotations

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from distca.apps.report.record import StepDetail
from distca.apps.report.style import BLUE, GREEN, LIGHT_SKY, ORANGE, PURPLE, SPARE
from distca.process.plain_text import figure_text

MILLI = 1e3

_OWN_COLOURS = {
    "compute forward": BLUE,
    "compute backward": GREEN,
    "send": ORANGE,
    "wait": "#BDBDBD",
    "attention under way": LIGHT_SKY,
    "kernel": PURPLE,
}


def draw_timeline(detail: StepDetail, *, on_gpu: bool = False) -> Figure:
    """The timeline of a run's step: one row a lane, in order of first appearance; one colour a kind
    of event.

    Args:
        detail: of the step.
        on_gpu: the events are of the thread that launches a GPU's work, and the title says so.
    """
    events = detail.timeline
    lanes = list(dict.fromkeys(event.lane for event in events))
    kinds = list(dict.fromkeys(event.name for event in events))
    colours = _colours(kinds)
    figure = Figure(figsize=(11, 1.4 + 0.42 * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for event in events:
        axes.barh(
            lanes.index(event.lane),
            (event.end_seconds - event.begin_seconds) * MILLI,
            left=event.begin_seconds * MILLI,
            height=0.72,
            color=colours[event.name],
            edgecolor="white",
            linewidth=0.4,
        )
    axes.set_yticks(range(len(lanes)), [figure_text(lane) for lane in lanes])
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.grid(visible=True, axis="x")
    axes.margins(x=0.01)
    axes.set_xlim(left=0)
    axes.set_xlabel("time in the step (ms)")
    whose = ": the thread that launches the GPU's work" if on_gpu else ""
    axes.set_title(f"Step {detail.step} on rank 0{whose}")
    if kinds != lanes:
        axes.legend(
            handles=[Patch(color=colours[kind], label=figure_text(kind)) for kind in kinds],
            loc="upper left",
            bbox_to_anchor=(1.005, 1),
            borderaxespad=0,
        )
    return figure


def _colours(kinds: list[str]) -> dict[str, str]:
    """The same colour for a kind in every report; kinds without one of their own take turns."""
    spare = iter(SPARE * len(kinds))
    return {kind: _OWN_COLOURS.get(kind) or next(spare) for kind in kinds}
