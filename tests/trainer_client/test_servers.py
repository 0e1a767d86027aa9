"""How a rank connects to the servers of a plan, on a transport that answers as the test says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from data_plane.metrics import DataPlaneMetrics
from data_plane.transport import Address, ConnectFailed, Connection, HandshakeRejected
from tests.fuzz.loopback import LoopbackConnection
from tests.trainer_client.answers import SHAPE, one_document_over_two_ranks
from trainer_client.metrics import TrainerMetrics
from trainer_client.options import SessionOptions
from trainer_client.step.servers import EpochOver, ServerLinks, ServersUnreachable

PLAN = replace(one_document_over_two_ranks(), epoch=5)
PATIENCE_SECONDS = 0.3
CONNECT_SECONDS = 1.0


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
    registry = CollectorRegistry()
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
    made = ServerLinks(
        transport,
        options,
        lambda server, first_step, epoch: b"hello",
        lambda: b"token",
        TrainerMetrics(registry, "job", 0),
        DataPlaneMetrics(CollectorRegistry()),
    )
    made.begin_epoch(5, "it begins")
    return made


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
    with pytest.raises(ServersUnreachable, match="refused") as caught:
        links(transport).connect(PLAN, 0)
    assert set(caught.value.causes) == {"server-0", "server-1"}
    assert transport.calls == 2


def test_silent_servers_are_given_up_together_like_those_that_answer_no_ping() -> None:
    began, transport = time.monotonic(), Scripted(silent)
    with pytest.raises(ServersUnreachable) as caught:
        links(transport).connect(PLAN, 0)
    assert PATIENCE_SECONDS <= time.monotonic() - began < CONNECT_SECONDS
    assert set(caught.value.causes) == {"server-0", "server-1"}
    assert transport.most_at_once == 2


def test_a_recovery_does_not_wait_for_a_silent_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_client.step.servers._ATTEMPT_SECONDS", PATIENCE_SECONDS / 10)
    made = links(Scripted(silent))
    begin = threading.Timer(PATIENCE_SECONDS / 5, made.begin_epoch, (6, "a recovery"))
    begin.start()
    with pytest.raises(EpochOver):
        made.connect(PLAN, 0)
    begin.join()


def test_a_server_that_does_not_know_the_job_yet_is_asked_again() -> None:
    began = time.monotonic()

    def late(timeout: float) -> Connection:
        if time.monotonic() - began < 2 * PATIENCE_SECONDS:
            raise HandshakeRejected("unknown job 'job'", transport="scripted", peer="server")
        return connected()

    made = links(Scripted(late))
    assert set(made.connect(PLAN, 0)) == {"server-0", "server-1"}


def test_a_server_that_knows_of_a_later_recovery_ends_the_attempt() -> None:
    def over(timeout: float) -> Connection:
        raise HandshakeRejected(
            "epoch 5 of job 'job' is over", transport="scripted", peer="server", proven=True
        )

    with pytest.raises(EpochOver):
        links(Scripted(over)).connect(PLAN, 0)


def test_somebody_who_only_says_that_it_is_a_server_is_asked_again() -> None:
    """Whoever answers at the address may say anything; the server may come a moment later."""
    began = time.monotonic()

    def pretended(timeout: float) -> Connection:
        if time.monotonic() - began < PATIENCE_SECONDS / 2:
            raise HandshakeRejected(
                "epoch 5 of job 'job' is over", transport="scripted", peer="server"
            )
        return connected()

    assert set(links(Scripted(pretended)).connect(PLAN, 0)) == {"server-0", "server-1"}


def test_somebody_who_never_proves_anything_is_given_up_like_a_silent_server() -> None:
    def pretended(timeout: float) -> Connection:
        raise HandshakeRejected("go away", transport="scripted", peer="server")

    began = time.monotonic()
    with pytest.raises(ServersUnreachable):
        links(Scripted(pretended)).connect(PLAN, 0)
    assert PATIENCE_SECONDS <= time.monotonic() - began < CONNECT_SECONDS


def test_a_refusal_with_a_proof_counts_at_once() -> None:
    def no_memory(timeout: float) -> Connection:
        raise HandshakeRejected("no memory", transport="scripted", peer="server", proven=True)

    transport = Scripted(no_memory)
    with pytest.raises(ServersUnreachable, match="no memory"):
        links(transport).connect(PLAN, 0)
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
    with pytest.raises(EpochOver, match="step 5 was given up"):
        made.connect(PLAN, 5, wanted=lambda: not given_up.is_set())
    assert [connection.closed for connection in left] == [True]
    calls = transport.calls
    with pytest.raises(EpochOver, match="step 5 was given up"):
        made.connect(PLAN, 5, wanted=lambda: False)
    assert transport.calls == calls
