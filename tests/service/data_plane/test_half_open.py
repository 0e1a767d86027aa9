"""Strangers that connect to data ports and never say hello: few at a time, and members get in."""

from __future__ import annotations

import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest
from ucxx._lib import libucxx

from data_plane.half_open import HalfOpen, half_open_limit
from data_plane.process_sockets import AcceptedSockets
from data_plane.transport import Address
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.listener import Listener
from tests.service.data_plane.secret import SECRET
from tests.service.data_plane.strangers import LOOPBACK, WAIT_SECONDS, ended, open_at, strangers
from tests.support.waiting import eventually

LIMIT = 20
STRANGERS = 120
HELLO_SECONDS = 2.0
UCX_MAGIC = bytes.fromhex("78563412bebafeca")


class Victim(Listener):
    """A listener that few strangers may occupy."""

    def __init__(self) -> None:
        super().__init__(
            UcxxSettings(
                data_host=LOOPBACK, handshake_timeout_seconds=HELLO_SECONDS, max_half_open=LIMIT
            )
        )

    @property
    def own_port(self) -> int:
        """UCX's, besides the listener."""
        (port,) = self.transport._worker.ports
        return port

    def refused(self, cause: str) -> float:
        return self.count("handshakes_refused_total", cause)

    @property
    def connections(self) -> float:
        return self.count("connections")


@pytest.fixture
def victim() -> Iterator[Victim]:
    with closing(Victim()) as victim:
        yield victim


@pytest.fixture
def member() -> Iterator[UcxxTransport]:
    with closing(UcxxTransport(UcxxSettings(data_host=LOOPBACK))) as transport:
        yield transport


@pytest.mark.parametrize("beginning", [b"", UCX_MAGIC[:4]], ids=["nothing", "half-a-message"])
@pytest.mark.parametrize("where", ["listener", "own-port"])
def test_connections_that_say_nothing_to_ucx_are_few_and_end(
    victim: Victim, member: UcxxTransport, where: str, beginning: bytes
) -> None:
    port = victim.address.port if where == "listener" else victim.own_port
    connection, _ = member.connect(victim.address, b"", WAIT_SECONDS, secret=SECRET)
    before = open_at(port)
    with ExitStack() as stack:
        silent = strangers(stack, port, STRANGERS, beginning)
        eventually(lambda: victim.refused("no-room") >= STRANGERS - LIMIT, WAIT_SECONDS)
        eventually(lambda: open_at(port) <= before + LIMIT, WAIT_SECONDS)
        member.connect(victim.address, b"", WAIT_SECONDS, secret=SECRET)[0].close()
        eventually(lambda: all(map(ended, silent)), WAIT_SECONDS)
        eventually(lambda: open_at(port) <= before, WAIT_SECONDS)
    assert victim.refused("no-room") + victim.refused("timeout") == STRANGERS
    assert not connection.closed


def test_a_crowd_of_one_host_puts_out_its_own(victim: Victim) -> None:
    port = victim.address.port
    with ExitStack() as stack:
        (early,) = strangers(stack, port, 1, source="127.0.0.3")
        crowd = strangers(stack, port, STRANGERS, source="127.0.0.2")
        eventually(lambda: sum(map(ended, crowd)) >= STRANGERS - LIMIT, WAIT_SECONDS)
        # On a machine that is very busy its time may be over.
        assert not ended(early) or victim.refused("timeout") > 0


class Crowd:
    """UCX endpoints in this process that connect and never say hello."""

    def __init__(self, address: Address, count: int) -> None:
        feature = libucxx.Feature
        options = UcxxSettings().context_options({})
        context = libucxx.UCXContext(options, (feature.TAG, feature.STREAM, feature.WAKEUP))
        self._worker = libucxx.UCXWorker(context)
        self._endpoints = [
            libucxx.UCXEndpoint.create(self._worker, address.host, address.port, True)
            for _ in range(count)
        ]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._progress, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(WAIT_SECONDS)

    def _progress(self) -> None:
        while not self._over.wait(0.001):
            self._worker.progress()


def test_clients_that_speak_ucx_and_say_no_hello_are_few_and_end(
    victim: Victim, member: UcxxTransport
) -> None:
    connection, _ = member.connect(victim.address, b"", WAIT_SECONDS, secret=SECRET)
    before = open_at(victim.address.port)
    with closing(Crowd(victim.address, STRANGERS)):
        eventually(lambda: victim.refused("no-room") >= STRANGERS - LIMIT, WAIT_SECONDS)
        eventually(lambda: victim.connections <= 1 + LIMIT, WAIT_SECONDS)
        member.connect(victim.address, b"", WAIT_SECONDS, secret=SECRET)[0].close()
        eventually(lambda: open_at(victim.address.port) <= before, WAIT_SECONDS)
        eventually(lambda: victim.connections == 1, WAIT_SECONDS)
        assert victim.refused("timeout") > 0
    assert not connection.closed


def test_members_get_in_while_strangers_keep_coming(victim: Victim, member: UcxxTransport) -> None:
    over = threading.Event()

    def come_and_stay() -> None:
        with ExitStack() as stack:
            while not over.wait(0.002):
                strangers(stack, victim.address.port, 1, UCX_MAGIC[:4], source="127.0.0.2")

    stranger = threading.Thread(target=come_and_stay)
    stranger.start()
    try:
        eventually(lambda: victim.refused("no-room") > LIMIT, WAIT_SECONDS)
        for _ in range(20):
            member.connect(victim.address, b"", WAIT_SECONDS, secret=SECRET)[0].close()
        # At any moment there may be more, which have come since the port was looked at.
        eventually(lambda: open_at(victim.address.port) < STRANGERS, WAIT_SECONDS)
    finally:
        over.set()
        stranger.join(WAIT_SECONDS)


def put_out_of(half_open: HalfOpen[str], arrivals: list[tuple[str, str]]) -> list[str]:
    gone: list[str] = []
    for key, host in arrivals:
        half_open.enter(key, host, lambda key=key: gone.append(key))  # type: ignore[misc]
    return gone


def test_the_oldest_of_the_host_with_most_goes() -> None:
    half_open: HalfOpen[str] = HalfOpen(3)
    arrivals = [("member", "a"), ("s1", "b"), ("s2", "b"), ("s3", "b"), ("s4", "b")]
    assert put_out_of(half_open, arrivals) == ["s1", "s2"]
    assert list(half_open) == ["member", "s3", "s4"]
    assert len(half_open) == 3


def test_a_process_with_few_files_takes_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, limit in ((1024, 128), (4, 1), (10**6, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, files=files: (files, files))
        assert half_open_limit(4096) == limit


def test_sockets_that_are_of_no_interest_are_looked_at_once() -> None:
    asked: list[int] = []
    with socket.create_server((LOOPBACK, 0)) as listener, ExitStack() as stack:
        port = listener.getsockname()[1]
        strangers(stack, port, 1, b"seven b")
        near, _ = listener.accept()
        stack.enter_context(near)
        sockets = AcceptedSockets()

        def has_sent_much(accepted: object) -> bool:
            asked.append(1)
            return False

        sockets.find(has_sent_much)
        first = len(asked)
        assert not sockets.find(has_sent_much)
        assert len(asked) == first
        sockets.forget()
        time.sleep(0.05)
        (found,) = sockets.find(lambda accepted: accepted.port == port)
        assert found.received_bytes == 7
        found.shut_down()
        assert near.recv(100) == b"seven b"
        assert near.recv(100) == b""
