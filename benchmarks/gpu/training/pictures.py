"""A picture of one step of one way, from what the end-to-end benchmark writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.gpu.training.trace import category_of
from distca.apps.report.record import TimelineEvent
from distca.apps.report.style import figure_style
from distca.apps.report.timeline import draw_events

SHORTEST_IDLE_SECONDS = 1e-3
"""Shorter pauses of a device are not drawn."""

LANES = {
    "matrix products": "matrix products",
    "attention": "attention",
    "elementwise": "elementwise",
    "nccl": "NCCL",
    "copies": "copies",
}
"""Categories of kernels that have a lane of their own; all others share one."""
OTHERS, IDLE = "others", "idle"


def save_timeline(result: Mapping[str, Any], title: str, path: Path) -> None:
    """Writes the picture of ``result``, one of the benchmark's ways, as PNG to ``path``.

    Raises:
        ValueError: it has neither a traced step nor a timeline.
    """
    with figure_style():
        draw_timeline(result, title).savefig(path)


def draw_timeline(result: Mapping[str, Any], title: str) -> Figure:
    """What rank 0's device did in the first traced step, by kind of kernel; where no device was
    traced, what its thread did in the last step.

    Raises:
        ValueError: ``result`` has neither.
    """
    way = f"{title}: {result['way']}"
    traces = [trace for trace in result["traces"] if trace.get("kernels")]
    if traces:
        events = device_events(traces[0]["names"], traces[0]["kernels"])
        idle = traces[0]["idle_seconds"] / traces[0]["seconds"]
        return draw_events(events, f"{way}, GPU of rank 0, idle for {idle:.1%}", outlined=False)
    if result["timeline"]:
        events = [TimelineEvent(**event) for event in result["timeline"]]
        return draw_events(events, f"{way}, the training thread of rank 0")
    raise ValueError(
        f"way {result['way']!r} has no timeline: only DistCA's ways keep one, and others are "
        f"traced on GPUs with --trace {result['way']}"
    )


def device_events(names: Sequence[str], kernels: Sequence[Sequence[int]]) -> list[TimelineEvent]:
    """One event for each kernel, in the lane of its category, and one for each pause of the device.

    Args:
        names: of the kernels.
        kernels: begin and length in microseconds, index of the name, stream; by begin.
    """
    lanes: dict[str, list[TimelineEvent]] = {lane: [] for lane in (*LANES.values(), OTHERS, IDLE)}
    busy_until = 0.0
    for begin_us, length_us, name, _ in kernels:
        begin, end = begin_us / 1e6, (begin_us + length_us) / 1e6
        lane = LANES.get(category_of(names[name]), OTHERS)
        lanes[lane].append(_event(lane, begin, end))
        if begin - busy_until >= SHORTEST_IDLE_SECONDS:
            lanes[IDLE].append(_event(IDLE, busy_until, begin))
        busy_until = max(busy_until, end)
    return [event for events in lanes.values() for event in events]


def _event(lane: str, begin: float, end: float) -> TimelineEvent:
    return TimelineEvent(lane=lane, name=lane, begin_seconds=begin, end_seconds=end)
