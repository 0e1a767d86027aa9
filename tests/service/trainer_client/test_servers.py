"""How a rank connects to the servers of a plan, on a transport that answers as the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from data_plane.transport import Address, ConnectFailed, Connection, HandshakeRejected
from distca.v1 import data_plane_pb2
from tests.support.loopback import LoopbackConnection
from tests.unit.trainer_client.answers import SHAPE, one_document_over_two_ranks
from trainer_client.options import SessionOptions
from trainer_client.step.servers import NotWanted, ServerLinks, Unreachable

PLAN = replace(one_document_over_two_ranks(), epoch=5)
PATIENCE_SECONDS = 0.3
CONNECT_SECONDS = 20.0


class Scripted:
    """A transport whose ``connect`` does what the test says."""

    name = "scripted"

    def __init__(self, answer: Callable[[float], Connection]) -> None:
        self._answer = answer
        self.calls = self.most_at_once = 0
        self._at_once = 0
        self._lock = threading.Lock()

    def connect(
        self, address: Address, hello: bytes, timeout: float, *, secret: bytes
    ) -> tuple[Connection, bytes]:
        assert secret == b"token"
        with self._lock:
            self.calls += 1
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return self._answer(timeout), b""
        finally:
            with self._lock:
                self._at_once -= 1


def links(transport: Any) -> ServerLinks:
    options = SessionOptions(
        control_plane="127.0.0.1:1",
        job="job",
        rank=0,
        n_ranks=2,
        n_layers=1,
        shape=SHAPE,
        data_host="127.0.0.1",
        probe_bytes=0,
        connect_timeout_seconds=CONNECT_SECONDS,
    )
    object.__setattr__(options, "ping_quiet_seconds", PATIENCE_SECONDS / 2)
    object.__setattr__(options, "ping_timeout_seconds", PATIENCE_SECONDS / 2)
    return ServerLinks(
        transport,
        options,
        lambda server, first_step, epoch: b"hello",
        lambda: b"token",
    )


def always() -> bool:
    return True


def connected() -> LoopbackConnection:
    near, far = LoopbackConnection("server"), LoopbackConnection("rank")
    near.other, far.other = far, near
    return near


def silent(timeout: float) -> Connection:
    time.sleep(timeout)
    raise ConnectFailed("no answer before the deadline", transport="scripted", peer="server")


def connected_soon(timeout: float) -> Connection:
    return connected()


def refused(timeout: float) -> Connection:
    raise ConnectFailed("connection refused", transport="scripted", peer="server")


def test_a_server_that_refuses_is_unreachable_at_once() -> None:
    transport = Scripted(refused)
    with pytest.raises(Unreachable) as caught:
        links(transport).connect(PLAN, 0, wanted=always)
    assert set(caught.value.causes) == {"server-0", "server-1"}
    assert transport.calls == 2


def pretended(timeout: float) -> Connection:
    """Anybody at the address may say so."""
    raise HandshakeRejected("go away", transport="scripted", peer="server")


@pytest.mark.parametrize("answer", [silent, pretended])
def test_servers_that_prove_nothing_are_given_up_together_like_those_that_answer_no_ping(
    answer: Callable[[float], Connection],
) -> None:
    began, transport = time.monotonic(), Scripted(answer)
    with pytest.raises(Unreachable) as caught:
        links(transport).connect(PLAN, 0, wanted=always)
    assert PATIENCE_SECONDS <= time.monotonic() - began < CONNECT_SECONDS
    assert set(caught.value.causes) == {"server-0", "server-1"}
    assert transport.most_at_once == 2 or answer is pretended


def test_a_recovery_does_not_wait_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.step.servers._ATTEMPT_SECONDS", PATIENCE_SECONDS / 10)
    made = links(Scripted(silent))
    recovery = threading.Event()
    begin = threading.Timer(PATIENCE_SECONDS / 5, recovery.set)
    begin.start()
    with pytest.raises(NotWanted):
        made.connect(PLAN, 0, wanted=lambda: not recovery.is_set())
    begin.join()


def refusal(code: int, *, proven: bool = False) -> HandshakeRejected:
    return HandshakeRejected("no", transport="scripted", peer="server", proven=proven, code=code)


def test_a_server_that_does_not_know_the_job_yet_is_asked_again() -> None:
    began = time.monotonic()

    def late(timeout: float) -> Connection:
        if time.monotonic() - began < 2 * PATIENCE_SECONDS:
            raise refusal(data_plane_pb2.HELLO_REFUSAL_UNKNOWN)
        return connected()

    made = links(Scripted(late))
    assert set(made.connect(PLAN, 0, wanted=always)) == {"server-0", "server-1"}


def test_a_server_that_knows_of_a_later_recovery_ends_the_attempt() -> None:
    def over(timeout: float) -> Connection:
        raise refusal(data_plane_pb2.HELLO_REFUSAL_EPOCH_OVER, proven=True)

    with pytest.raises(NotWanted):
        links(Scripted(over)).connect(PLAN, 0, wanted=always)


def test_somebody_who_only_says_that_it_is_a_server_is_asked_again() -> None:
    """Whoever answers at the address may say anything; the server may come a moment later."""
    began = time.monotonic()

    def pretended(timeout: float) -> Connection:
        if time.monotonic() - began < PATIENCE_SECONDS / 2:
            raise refusal(data_plane_pb2.HELLO_REFUSAL_EPOCH_OVER)
        return connected()

    assert set(links(Scripted(pretended)).connect(PLAN, 0, wanted=always)) == {
        "server-0",
        "server-1",
    }


def test_a_refusal_with_a_proof_counts_at_once() -> None:
    def no_memory(timeout: float) -> Connection:
        raise HandshakeRejected("no memory", transport="scripted", peer="server", proven=True)

    transport = Scripted(no_memory)
    with pytest.raises(Unreachable):
        links(transport).connect(PLAN, 0, wanted=always)
    assert transport.calls == len(PLAN.servers)


@pytest.mark.parametrize("other", [connected_soon, refused], ids=["all made", "one refused"])
def test_no_connection_is_left_for_a_step_that_was_given_up(
    other: Callable[[float], Connection],
) -> None:
    """Its server would wait for the step's ticks, and not take those of the next one."""
    given_up = threading.Event()
    left: list[LoopbackConnection] = []

    def answer(timeout: float) -> Connection:
        given_up.set()
        if transport.calls > 1:
            return other(timeout)
        left.append(connected())
        return left[0]

    transport = Scripted(answer)
    made = links(transport)
    with pytest.raises(NotWanted):
        made.connect(PLAN, 5, wanted=lambda: not given_up.is_set())
    assert [connection.closed for connection in left] == [True]
    calls = transport.calls
    with pytest.raises(NotWanted):
        made.connect(PLAN, 5, wanted=lambda: False)
    assert transport.calls == calls
