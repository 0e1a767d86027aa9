"""When the receive of a reply is posted, and what becomes of its memory."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from core_attention.ca_task import Phase
from core_attention.score_rule import PLAIN
from core_attention.tick import Tick
from data_plane.buffer_pool import BufferPool, BufferPoolExhausted, PooledBuffer
from data_plane.transport import PeerLost, Transfer, TransferState
from distca.contract.server_loss import LossCause
from tests.support.loopback import LoopbackConnection, LoopbackTransfer
from trainer_client.step import replies

NBYTES = 1000


class Line(LoopbackConnection):
    """Notes offers and their deadlines."""

    def __init__(self) -> None:
        super().__init__("node-0")
        self.offered: list[LoopbackTransfer] = []
        self.seconds: list[float] = []

    def offer(self, tag: int, buffer: PooledBuffer, deadline_seconds: float) -> Transfer:
        transfer = super().offer(tag, buffer, deadline_seconds)
        self.offered.append(self.offers[tag])
        self.seconds.append(deadline_seconds)
        return transfer


class Rows:
    """Unpacks nothing, as a kernel that is launched and has not run."""

    def __init__(self) -> None:
        self.unpacked = 0

    def unpack(self, message: Any, outputs: Any, gradients: Any) -> None:
        assert message.numel() == NBYTES
        self.unpacked += 1


class Event:
    """A CUDA event that the test completes."""

    done = False

    def query(self) -> bool:
        return self.done


class Waiting:
    """A reply that is awaited, of a request that has not gone yet."""

    def __init__(self, nbytes: int = NBYTES, pool: BufferPool | None = None) -> None:
        self.pool = pool or BufferPool()
        self.connection, self.rows = Line(), Rows()
        # Its memory is not of the pool that is looked at.
        self.request = LoopbackTransfer(0, BufferPool().acquire(1))
        exchanger: Any = SimpleNamespace(
            pool=self.pool,
            deadline_seconds=30.0,
            await_end=lambda exchange, transfer: None,
            examiner=SimpleNamespace(fault=lambda *args: None),
            job=SimpleNamespace(rule=lambda tick: PLAIN),
        )
        exchange: Any = SimpleNamespace(
            server_id="node-0",
            connection=self.connection,
            reply=SimpleNamespace(nbytes=nbytes),
            rows=self.rows,
        )
        self.reply = replies._RemoteAwaited(
            exchanger, exchange, Tick(0, 0, 0, Phase.FORWARD), {}, self.request
        )
        self.request.add_done_callback(self.reply.request_ended)

    @property
    def in_use_bytes(self) -> int:
        return self.pool.stats().in_use_bytes


def lost() -> PeerLost:
    return PeerLost("it died", transport="ucxx", peer="node-0")


def test_a_reply_has_no_memory_before_its_request_has_gone() -> None:
    waiting = Waiting()
    assert not waiting.reply.arrived()
    assert (waiting.in_use_bytes, waiting.connection.offered) == (0, [])
    waiting.reply.wait(0.001)
    waiting.request.end()
    assert (waiting.in_use_bytes, len(waiting.connection.offered)) == (1024, 1)
    assert 29.0 < waiting.connection.seconds[0] <= 30.0, "one deadline for both"
    assert not waiting.reply.arrived()
    waiting.connection.offered[0].end()
    assert waiting.reply.arrived()
    waiting.reply.examine()
    waiting.reply.take_in({}, {})
    assert (waiting.rows.unpacked, waiting.in_use_bytes) == (1, 0)


def test_a_request_that_took_all_of_its_time_leaves_some_for_the_reply() -> None:
    """A process that was stopped for a while hears of it late."""
    waiting = Waiting()
    waiting.reply._until = time.monotonic() - 5.0
    waiting.request.end()
    assert waiting.connection.seconds == [1.0]


def test_a_reply_that_is_let_go_early_is_received_all_the_same() -> None:
    """Its server waits until somebody takes it."""
    waiting = Waiting()
    waiting.reply.let_go()
    waiting.request.end()
    assert waiting.in_use_bytes == 1024
    waiting.connection.offered[0].end()
    assert waiting.in_use_bytes == 0


@pytest.mark.parametrize("fails", ["request", "offer", "reply"])
def test_a_failure_is_raised_to_who_waits_and_gives_the_memory_back(
    fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting()

    def refuse(tag: int, buffer: PooledBuffer, deadline_seconds: float) -> Transfer:
        raise lost()

    if fails == "offer":
        monkeypatch.setattr(waiting.connection, "offer", refuse)
    waiting.request.end(lost() if fails == "request" else None)
    if fails == "reply":
        waiting.connection.offered[0].end(lost())
    waiting.reply.wait(0.001)
    with pytest.raises(replies.ExchangeFailed) as raised:
        waiting.reply.arrived()
    assert (raised.value.server_id, raised.value.cause) == ("node-0", LossCause.TRANSPORT_ERROR)
    waiting.reply.let_go()
    assert waiting.in_use_bytes == 0


def test_a_reply_without_memory_is_told_to_who_waits() -> None:
    waiting = Waiting(pool=BufferPool(limit_bytes=512))
    waiting.request.end()
    waiting.reply.wait(0.001)
    with pytest.raises(BufferPoolExhausted):
        waiting.reply.arrived()


def test_nothing_is_posted_where_no_rows_come_back() -> None:
    """A rank that gives only keys, forward."""
    waiting = Waiting(nbytes=0)
    assert waiting.reply.arrived()
    waiting.request.end()
    waiting.reply.examine()
    waiting.reply.take_in({}, {})
    assert (waiting.rows.unpacked, waiting.connection.offered, waiting.in_use_bytes) == (0, [], 0)


def test_memory_of_a_reply_is_kept_until_the_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The in-place server, which takes from the same pool, would receive into it."""
    event = Event()
    monkeypatch.setattr(replies, "launched_work", lambda device: event.query)
    waiting = Waiting()
    waiting.request.end()
    waiting.connection.offered[0].end()
    waiting.reply.take_in({}, {})
    assert waiting.in_use_bytes == 1024
    event.done = True
    assert waiting.in_use_bytes == 0


def test_reply_that_arrives_during_a_look_loses_no_server() -> None:
    """Another thread ends it between any two looks at it."""
    waiting = Waiting()
    waiting.request.end()
    states = iter((TransferState.PENDING, TransferState.DONE))

    class Ending:
        error = None

        @property
        def state(self) -> TransferState:
            return next(states)

    ending: Any = Ending()
    waiting.reply._transfer = ending
    assert [waiting.reply.arrived(), waiting.reply.arrived()] == [False, True]
