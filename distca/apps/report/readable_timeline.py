"""From a session's trace to a timeline that people can read.

The trace holds what the trainer did around its calls: turns of the forward pass, sends and waits.
What lies between them is compute, and between the send and the end of the wait of a tick its core
attention is under way. In the backward pass one thread runs the nodes of both nano-batches, and the
compute before a send belongs to the nano-batch that sends.
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
    turns = [event for event in events if event.name == "turn"]
    others = [event for event in events if event.name not in ("send", "wait", "turn")]
    timeline = [_event(event.lane, event.name, *_span(event)) for event in calls]
    timeline += _forward_compute(turns, calls)
    timeline += _backward_compute(turns, calls)
    timeline += _under_way(calls)
    timeline.sort(key=lambda event: (event.lane, event.begin_seconds))
    return timeline + [_event(event.lane, event.name, *_span(event)) for event in others]


def _forward_compute(
    turns: Sequence[TraceEvent], calls: Sequence[TraceEvent]
) -> Iterator[TimelineEvent]:
    """The rest of each turn when its sends and waits are taken out."""
    for turn in turns:
        begin = turn.begin_seconds
        inside = [
            call
            for call in calls
            if call.lane == turn.lane and begin <= call.begin_seconds < turn.end_seconds
        ]
        for call in inside:
            yield from _stretch(turn.lane, Phase.FORWARD, begin, call.begin_seconds)
            begin = call.end_seconds
        yield from _stretch(turn.lane, Phase.FORWARD, begin, turn.end_seconds)


def _backward_compute(
    turns: Sequence[TraceEvent], calls: Sequence[TraceEvent]
) -> Iterator[TimelineEvent]:
    """The stretches between the calls of the backward pass."""
    backward = [call for call in calls if call.detail.endswith(Phase.BACKWARD)]
    end_of_forward = max((turn.end_seconds for turn in turns), default=None)
    before = [call.end_seconds for call in calls if not call.detail.endswith(Phase.BACKWARD)]
    begin = max([*before, *([] if end_of_forward is None else [end_of_forward])], default=0.0)
    for call in backward:
        if call.name == "send":
            yield from _stretch(call.lane, Phase.BACKWARD, begin, call.begin_seconds)
        begin = call.end_seconds


def _under_way(calls: Sequence[TraceEvent]) -> Iterator[TimelineEvent]:
    """From each send to the end of the wait for its results."""
    sent: dict[tuple[str, str], TraceEvent] = {}
    for call in calls:
        if call.name == "send":
            sent[call.lane, call.detail] = call
        elif (send := sent.pop((call.lane, call.detail), None)) is not None:
            yield _event(f"{call.lane} attention", UNDER_WAY, send.end_seconds, call.end_seconds)


def _stretch(lane: str, phase: Phase, begin: float, end: float) -> Iterator[TimelineEvent]:
    if end - begin >= SHORTEST_SECONDS:
        yield _event(lane, f"compute {phase}", begin, end)


def _event(lane: str, name: str, begin: float, end: float) -> TimelineEvent:
    return TimelineEvent(lane=lane, name=name, begin_seconds=begin, end_seconds=end)


def _span(event: TraceEvent) -> tuple[float, float]:
    return event.begin_seconds, event.end_seconds
