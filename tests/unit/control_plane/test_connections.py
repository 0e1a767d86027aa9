"""TLS connections that bring no call are counted, once each."""

from __future__ import annotations

from control_plane.access.connections import FORGET_SECONDS, Connections


class Clock:
    now = 0.0


def make() -> tuple[Connections, Clock]:
    clock = Clock()
    return Connections(lambda: clock.now, patience_seconds=10.0), clock


def test_a_connection_without_a_call_has_failed_after_a_while() -> None:
    connections, clock = make()
    connections.begun()
    clock.now = 10.0
    assert connections.take_failed() == 0
    clock.now = 10.1
    assert connections.take_failed() == 1
    assert connections.take_failed() == 0


def test_one_that_brings_calls_has_not() -> None:
    connections, clock = make()
    connections.called("ipv4:10.0.0.1:2")  # without TLS
    connections.begun()
    for _ in range(3):
        connections.called("ipv4:10.0.0.1:1")
    clock.now = 11.0
    assert connections.take_failed() == 0


def test_the_failed_are_counted_among_the_good() -> None:
    connections, clock = make()
    for port in range(10):
        connections.begun()
        clock.now += 0.1
        if port % 2:
            connections.called(f"ipv4:10.0.0.1:{port}")
    clock.now += 10.1
    assert connections.take_failed() == 5


def test_a_port_that_comes_again_much_later_is_another_connection() -> None:
    connections, clock = make()
    connections.begun()
    connections.called("ipv4:10.0.0.1:1")
    clock.now = FORGET_SECONDS + 1
    assert connections.take_failed() == 0
    connections.begun()
    connections.called("ipv4:10.0.0.1:1")
    clock.now += 11.0
    assert connections.take_failed() == 0
