"""What becomes of clients that have not said hello."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from data_plane.base_connection import BaseConnection
from data_plane.handshake import HandshakeFailure, Verdict
from data_plane.newcomers import Newcomers
from data_plane.owner_thread import OwnerThread
from data_plane.transport import TransportError


class Timer:
    def __init__(self, what: Callable[[], None]) -> None:
        self.what = what
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Owner:
    """Runs what is due when asked."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_at(self, _when: float, what: Callable[[], None]) -> Timer:
        self.timers.append(Timer(what))
        return self.timers[-1]

    def run_due(self) -> None:
        for timer in [timer for timer in self.timers if not timer.cancelled]:
            timer.what()


class Client:
    """A connection that notes why it was closed."""

    local_id, peer = 1, "a client"

    def __init__(self) -> None:
        self.closed: list[str] = []
        self._callbacks: list[Callable[[TransportError | None], None]] = []

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        self._callbacks.append(callback)

    def close(self, reason: str = "") -> None:
        self.closed.append(reason)
        for callback in self._callbacks:
            callback(None)


@pytest.fixture
def owner() -> Owner:
    return Owner()


@pytest.fixture
def refused() -> list[HandshakeFailure]:
    return []


@pytest.fixture
def newcomers(owner: Owner, refused: list[HandshakeFailure]) -> Newcomers:
    return Newcomers(
        cast(OwnerThread, owner), limit=2, timeout_seconds=5.0, on_refused=refused.append
    )


def enter(newcomers: Newcomers, host: str = "h") -> tuple[Any, Callable[[], None]]:
    client: Any = Client()
    return client, newcomers.enter(cast(BaseConnection, client), host)


def test_who_says_nothing_in_time_is_closed(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client, _ = enter(newcomers)
    owner.run_due()
    assert client.closed == ["no hello within 5.0 s"]
    assert refused == [HandshakeFailure.TIMEOUT]


def test_who_was_judged_has_no_deadline_and_counts_once(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client, judged = enter(newcomers)
    judged()
    newcomers.take_in(client)
    owner.run_due()
    client.close("later")
    assert client.closed == ["later"]
    assert refused == []


def test_who_goes_before_the_verdict_is_lost(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client, _ = enter(newcomers)
    client.close("gone")
    assert refused == [HandshakeFailure.LOST]
    owner.run_due()
    assert client.closed == ["gone"], "its deadline went with it"


def test_one_too_many_puts_one_out(newcomers: Newcomers, refused: list[HandshakeFailure]) -> None:
    clients = [enter(newcomers)[0] for _ in range(3)]
    assert sum(bool(client.closed) for client in clients) == 1
    assert refused == [HandshakeFailure.NO_ROOM]


def test_who_was_taken_in_makes_room(newcomers: Newcomers, refused: list[HandshakeFailure]) -> None:
    for _ in range(5):
        client, judged = enter(newcomers)
        judged()
        newcomers.take_in(client)
        assert not client.closed
    assert refused == []


def test_who_is_refused_may_read_why_before_it_is_closed(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client, judged = enter(newcomers)
    judged()
    verdict = Verdict(
        greeting=cast(Any, None), failure=HandshakeFailure.REFUSED, reason="another release"
    )
    newcomers.refuse(client, verdict)
    assert refused == [HandshakeFailure.REFUSED]
    assert client.closed == []
    owner.run_due()
    assert client.closed == ["refused: another release"]
    assert refused == [HandshakeFailure.REFUSED], "once"
