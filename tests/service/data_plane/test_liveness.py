"""Peers that are stopped or cut off are found while something is awaited from them, others never
blamed: with fakes for the timing, and with real processes over UCX."""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from data_plane.buffer_pool import BufferPool
from data_plane.liveness import LivenessMonitor
from data_plane.owner_thread import SWITCH_INTERVAL_SECONDS, Timer
from data_plane.pings import RECENT_MESSAGES, SUSPENDED_SECONDS, Pings
from data_plane.transport import (
    Connection,
    PeerLost,
    TransferState,
    TransferTimeout,
)
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.peer import PeerProcess, running_peer, say_port
from tests.service.data_plane.secret import SECRET, proven
from tests.support.waiting import eventually

QUIET_SECONDS = 0.2
PING_SECONDS = 0.5
SLACK_SECONDS = 5.0
"""Of a busy machine: threads that wake late."""


class FakeConnection:
    """Notes when it is pinged; hears what the test says."""

    def __init__(self) -> None:
        self.last_heard = time.monotonic()
        self.pings: list[float] = []
        self.ping_timeouts: set[float] = set()

    def ping(self, timeout_seconds: float) -> None:
        self.ping_timeouts.add(timeout_seconds)
        self.pings.append(time.monotonic())


@pytest.fixture
def monitor() -> Iterator[LivenessMonitor]:
    monitor = LivenessMonitor(quiet_seconds=QUIET_SECONDS, ping_timeout_seconds=PING_SECONDS)
    yield monitor
    monitor.close()


def test_quiet_connection_is_pinged_while_it_is_watched(monitor: LivenessMonitor) -> None:
    connection: Any = FakeConnection()
    start = time.monotonic()
    monitor.watch(connection)
    eventually(lambda: len(connection.pings) >= 2)
    assert connection.pings[0] - start >= QUIET_SECONDS * 0.8
    monitor.unwatch(connection)
    time.sleep(QUIET_SECONDS / 4)
    seen = len(connection.pings)
    time.sleep(2 * QUIET_SECONDS)
    assert len(connection.pings) == seen
    assert connection.ping_timeouts == {PING_SECONDS}


def test_a_peer_may_be_given_longer_to_answer(monitor: LivenessMonitor) -> None:
    connection: Any = FakeConnection()
    monitor.watch(connection, 20.0)
    eventually(lambda: len(connection.pings) >= 1)
    assert connection.ping_timeouts == {20.0}


def test_connection_that_is_heard_of_is_not_pinged(monitor: LivenessMonitor) -> None:
    connection: Any = FakeConnection()
    monitor.watch(connection)
    end = time.monotonic() + 3 * QUIET_SECONDS
    while time.monotonic() < end:
        connection.last_heard = time.monotonic()
        time.sleep(0.01)
    assert connection.pings == []


def test_connection_is_watched_until_its_last_wait_is_over(monitor: LivenessMonitor) -> None:
    connection: Any = FakeConnection()
    for _ in range(2):
        monitor.watch(connection)
    monitor.unwatch(connection)
    eventually(lambda: len(connection.pings) > 0)
    monitor.unwatch(connection)
    with pytest.raises(KeyError):
        monitor.unwatch(connection)


class FakeWorker:
    """An owner thread that runs what the test tells it to run."""

    thread_id = 0

    def __init__(self) -> None:
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def submit(self, command: Callable[[], None]) -> None:
        command()

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        self.timers.append((when, callback))
        return Timer(when, callback)


class FakePingedConnection:
    """What ``Pings`` sees of a connection."""

    closed, greeted = False, True

    def __init__(self, moving_bytes: int = 0) -> None:
        self.worker = FakeWorker()
        self.moving_bytes = moving_bytes
        self.sent: list[int] = []
        self.lost_after: float | None = None

    def send_control(self, operation: int, payload: bytes) -> None:
        self.sent.append(operation)

    def lose_silent_peer(self, seconds: float) -> None:
        self.lost_after = seconds


def test_process_that_was_itself_stopped_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("data_plane.pings.time.monotonic", lambda: now)
    connection = FakePingedConnection()
    pings = Pings(connection, 1.0)  # type: ignore[arg-type]
    pings.ask(5.0)
    now += 5.0 + 2 * SUSPENDED_SECONDS
    connection.worker.timers.pop()[1]()
    assert connection.lost_after is None
    assert len(connection.sent) == 2
    now += 5.0
    connection.worker.timers.pop()[1]()
    assert connection.lost_after == pytest.approx(10.0 + 2 * SUSPENDED_SECONDS)


def test_one_ping_is_under_way_at_a_time_and_waits_for_what_is_in_front_of_it() -> None:
    connection = FakePingedConnection(moving_bytes=300)
    pings = Pings(connection, 100.0)  # type: ignore[arg-type]
    start = time.monotonic()
    for _ in range(2):
        pings.ask(5.0)
    assert len(connection.sent) == 1
    ((when, _),) = connection.worker.timers
    assert when - start == pytest.approx(8.0, abs=0.1)


@pytest.mark.parametrize(
    ("received", "allowed"),
    [
        ([], 3.0),  # 2**31 bytes at the slowest network's rate, 2**30 bytes a second
        ([(2**30, 0.01)], 1.0 + 2 / 25),  # a quarter of 100 times that rate
        ([(2**30, 0.01), (2**30, 0.02)], 1.0 + 2 / 12.5),  # the slower one counts
        ([(2**30, 0.01), (1000, 0.02)], 1.0 + 2 / 25),  # small messages tell nothing
        ([(2**30, 2.0)], 3.0),  # never slower than the slowest network
        ([(2**30, 2.0), *[(2**30, 0.01)] * RECENT_MESSAGES], 1.0 + 2 / 25),  # forgotten
    ],
)
def test_an_answer_is_given_the_time_that_measured_messages_would_take(
    received: list[tuple[int, float]], allowed: float
) -> None:
    connection = FakePingedConnection(moving_bytes=2**31)
    pings = Pings(connection, 2.0**30)  # type: ignore[arg-type]
    for nbytes, seconds in received:
        pings.received(nbytes, seconds)
    start = time.monotonic()
    pings.ask(1.0)
    ((when, _),) = connection.worker.timers
    assert when - start == pytest.approx(allowed, abs=0.01)


# Real processes

_LIFETIME_SECONDS = 60.0


def make_transport() -> UcxxTransport:
    return UcxxTransport(UcxxSettings(one_host=True))


def serve_while_computing(factory: str, test: socket.socket) -> None:
    """A peer that never answers a request and whose main thread hogs the GIL, as a busy server's
    may; only its transport's thread is at hand."""
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    transport = make_transport()
    say_port(test, transport.listen("127.0.0.1", 0, proven()))
    end = time.monotonic() + _LIFETIME_SECONDS
    while time.monotonic() < end and not select.select([test], [], [], 0.0)[0]:
        sum(index * index for index in range(100_000))
    transport.close()


@pytest.fixture
def busy_peer() -> Iterator[PeerProcess]:
    with running_peer("", f"{__name__}:serve_while_computing") as peer:
        yield peer


def test_busy_peer_is_never_blamed_and_a_stopped_one_is_found_in_time(
    busy_peer: PeerProcess, monitor: LivenessMonitor
) -> None:
    transport, pool = make_transport(), BufferPool()
    connection: Connection
    connection, _ = transport.connect(busy_peer.address, b"", 10.0, secret=SECRET)
    offer = connection.offer(1, pool.acquire(1000), 60.0)
    monitor.watch(connection)
    with pytest.raises(TransferTimeout):
        offer.wait(5 * (QUIET_SECONDS + PING_SECONDS))
    assert offer.state is TransferState.PENDING
    busy_peer.stop()
    start = time.monotonic()
    with pytest.raises(PeerLost):
        offer.wait(10.0)
    assert time.monotonic() - start < QUIET_SECONDS + PING_SECONDS + SLACK_SECONDS
    transport.close()
