"""From a session's trace to a timeline that people can read.

The trace holds what the training thread did around its calls: sends and waits. What lies between
them is compute, which belongs to the nano-batch that sends after it, and between the send and the
end of the wait of a tick its core attention is under way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from core_attention.ca_task import Phase
from distca.apps.report.record import TimelineEvent
from trainer_client import TraceEvent

SHORTEST_SECONDS = 1e-4
"""Shorter stretches of compute are not drawn."""

UNDER_WAY = "attention under way"


def readable_timeline(trace: Iterable[TraceEvent]) -> list[TimelineEvent]:
    """Events in lanes: for every nano-batch what it did, then its core attention, then servers."""
    events = sorted(trace, key=lambda event: event.begin_seconds)
    calls = [event for event in events if event.name in ("send", "wait")]
    timeline = [_event(each.lane, each.name, *_span(each)) for each in calls]
    timeline += [*_compute(calls), *_under_way(calls)]
    timeline.sort(key=lambda event: (event.lane, event.begin_seconds))
    others = [event for event in events if event.name not in ("send", "wait", "turn")]
    return timeline + [_event(each.lane, each.name, *_span(each)) for each in others]


def _compute(calls: Sequence[TraceEvent]) -> Iterator[TimelineEvent]:
    """The stretches between the calls."""
    begin = 0.0
    for call in calls:
        if call.name == "send" and call.begin_seconds - begin >= SHORTEST_SECONDS:
            is_backward = call.detail.endswith(Phase.BACKWARD)
            phase = Phase.BACKWARD if is_backward else Phase.FORWARD
            yield _event(call.lane, f"compute {phase}", begin, call.begin_seconds)
        begin = call.end_seconds


def _under_way(calls: Sequence[TraceEvent]) -> Iterator[TimelineEvent]:
    """From each send to the end of the wait for its results."""
    sent: dict[tuple[str, str], TraceEvent] = {}
    for call in calls:
        if call.name == "send":
            sent[call.lane, call.detail] = call
        elif (send := sent.pop((call.lane, call.detail), None)) is not None:
            yield _event(f"{call.lane} attention", UNDER_WAY, send.end_seconds, call.end_seconds)


def _event(lane: str, name: str, begin: float, end: float) -> TimelineEvent:
    return TimelineEvent(lane=lane, name=name, begin_seconds=begin, end_seconds=end)


def _span(event: TraceEvent) -> tuple[float, float]:
    return event.begin_seconds, event.end_seconds
