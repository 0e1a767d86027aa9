"""The readable timeline fills the gaps of a trace and shows core attention under way."""

from __future__ import annotations

from distca.apps.report.readable_timeline import UNDER_WAY, readable_timeline
from trainer_client import TraceEvent


def spans(trace: list[TraceEvent], lane: str, name: str) -> list[tuple[float, float]]:
    return [
        (event.begin_seconds, event.end_seconds)
        for event in readable_timeline(trace)
        if event.lane == lane and event.name == name
    ]


FORWARD = [
    TraceEvent("nano-batch 0", "send", 1.0, 1.5, "layer 0 forward"),
    TraceEvent("nano-batch 1", "send", 2.0, 2.5, "layer 0 forward"),
    TraceEvent("nano-batch 0", "wait", 2.5, 3.0, "layer 0 forward"),
    TraceEvent("nano-batch 0", "send", 3.5, 4.0, "layer 1 forward"),
    TraceEvent("nano-batch 1", "wait", 4.0, 4.1, "layer 0 forward"),
]
BACKWARD = [
    TraceEvent("nano-batch 1", "send", 6.0, 6.5, "layer 0 backward"),
    TraceEvent("nano-batch 0", "send", 7.0, 7.5, "layer 0 backward"),
    TraceEvent("nano-batch 1", "wait", 7.5, 8.0, "layer 0 backward"),
    TraceEvent("nano-batch 0", "wait", 9.0, 9.5, "layer 0 backward"),
]


def test_compute_belongs_to_what_is_sent_after_it() -> None:
    trace = FORWARD + BACKWARD
    assert spans(trace, "nano-batch 0", "compute forward") == [(0.0, 1.0), (3.0, 3.5)]
    assert spans(trace, "nano-batch 1", "compute forward") == [(1.5, 2.0)]
    assert spans(trace, "nano-batch 1", "compute backward") == [(4.1, 6.0)]
    assert spans(trace, "nano-batch 0", "compute backward") == [(6.5, 7.0)]


def test_attention_is_under_way_from_the_send_to_the_end_of_the_wait() -> None:
    trace = FORWARD + BACKWARD
    assert spans(trace, "nano-batch 0 attention", UNDER_WAY) == [(1.5, 3.0), (7.5, 9.5)]
    assert spans(trace, "nano-batch 1 attention", UNDER_WAY) == [(2.5, 4.1), (6.5, 8.0)]


def test_servers_come_last_and_short_gaps_are_left_out() -> None:
    kernel = TraceEvent("in-place server", "kernel", 1.6, 1.9, "forward")
    trace = [kernel, *FORWARD]
    assert readable_timeline(trace)[-1].lane == "in-place server"
    almost = [TraceEvent("nano-batch 0", "send", 0.00001, 0.5, "layer 0 forward")]
    assert spans(almost, "nano-batch 0", "compute forward") == []
