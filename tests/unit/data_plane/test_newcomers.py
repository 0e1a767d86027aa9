"""What becomes of clients that have not said hello."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from data_plane.base_connection import BaseConnection
from data_plane.greeting import BadGreeting, Greeting, GreetingKind
from data_plane.handshake import ClientHandshake, HandshakeFailure
from data_plane.newcomers import Newcomers
from data_plane.owner_thread import OwnerThread
from data_plane.proof import ConnectionKeys, Ends
from data_plane.transport import TransportError
from tests.service.data_plane.secret import SECRET, proven

ENDS = Ends(client="10.0.0.1:1", server="10.0.0.2:2")


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
    """A connection that notes why it was closed, and what is said on it."""

    local_id, peer = 1, "a client"

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.heard: list[Greeting] = []
        self.keys: ConnectionKeys | None = None
        self._callbacks: list[Callable[[TransportError | None], None]] = []

    def send_greeting(self, greeting: Greeting) -> None:
        self.heard.append(greeting)

    def receive_greeting(
        self, on_greeting: Callable[[Greeting], None], on_bad: Callable[[ValueError], None]
    ) -> None:
        self.says, self.says_nonsense = on_greeting, on_bad

    def begin(self, keys: ConnectionKeys, *, listening: bool) -> None:
        assert listening
        self.keys = keys

    def add_closed_callback(self, callback: Callable[[TransportError | None], None]) -> None:
        self._callbacks.append(callback)

    def close(self, reason: str = "") -> None:
        self.closed.append(reason)
        for callback in self._callbacks:
            callback(None)

    def say_hello(self, secret: bytes = SECRET) -> None:
        self.says(ClientHandshake(b"hello", secret).answer(self.heard[0], ENDS))


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


def enter(newcomers: Newcomers, on_proven: Callable[[], None] = lambda: None) -> Client:
    client: Any = Client()
    newcomers.challenge(cast(BaseConnection, client), "h", ENDS, proven(), on_proven)
    return cast(Client, client)


def test_who_says_nothing_in_time_is_closed(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client = enter(newcomers)
    owner.run_due()
    assert len(client.closed) == 1
    assert refused == [HandshakeFailure.TIMEOUT]


def test_who_is_taken_in_has_no_deadline_and_makes_room(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    proven_clients: list[None] = []
    for _ in range(5):
        client = enter(newcomers, lambda: proven_clients.append(None))
        client.say_hello()
        assert client.keys is not None
        assert client.heard[-1].status is GreetingKind.ACCEPTED
        owner.run_due()
        assert not client.closed
    client.close("later")
    assert len(proven_clients) == 5
    assert refused == []


def test_who_goes_before_the_verdict_is_lost(
    newcomers: Newcomers, owner: Owner, refused: list[HandshakeFailure]
) -> None:
    client = enter(newcomers)
    client.close("gone")
    assert refused == [HandshakeFailure.LOST]
    owner.run_due()
    assert client.closed == ["gone"], "its deadline went with it"


def test_one_too_many_puts_one_out(newcomers: Newcomers, refused: list[HandshakeFailure]) -> None:
    clients = [enter(newcomers) for _ in range(3)]
    assert sum(bool(client.closed) for client in clients) == 1
    assert refused == [HandshakeFailure.NO_ROOM]


@pytest.mark.parametrize("failure", [HandshakeFailure.PROOF, HandshakeFailure.MALFORMED])
def test_who_is_refused_may_read_why_before_it_is_closed(
    newcomers: Newcomers,
    owner: Owner,
    refused: list[HandshakeFailure],
    failure: HandshakeFailure,
) -> None:
    client = enter(newcomers)
    if failure is HandshakeFailure.PROOF:
        client.say_hello(b"another secret")
    else:
        client.says_nonsense(BadGreeting("is none"))
    assert refused == [failure]
    assert client.heard[-1].status is GreetingKind.REFUSED
    assert client.keys is None
    assert client.closed == []
    owner.run_due()
    assert len(client.closed) == 1
    assert refused == [failure], "once"
