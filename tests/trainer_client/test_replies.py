"""What becomes of a reply's memory once its rows are taken in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from data_plane.buffer_pool import BufferPool
from data_plane.transport import TransferState
from trainer_client.step import replies


class Rows:
    """Unpacks nothing, as a kernel that is launched and has not run."""

    def unpack(self, message: Any, outputs: Any, gradients: Any) -> None:
        assert message.numel() == 1000


class Event:
    """A CUDA event that the test completes."""

    done = False

    def query(self) -> bool:
        return self.done


def take_in(pool: BufferPool) -> None:
    exchange: Any = SimpleNamespace(rows=Rows())
    tick: Any = None
    examiner: Any = None
    request: Any = None
    buffer = pool.acquire(1000)
    awaited = replies._RemoteAwaited(exchange, tick, {}, buffer, request, None, examiner)
    awaited.take_in({}, {})


def test_memory_of_a_reply_is_kept_until_the_device_has_read_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The in-place server, which takes from the same pool, would receive into it."""
    event = Event()
    monkeypatch.setattr(replies, "launched_work", lambda device: event.query)
    pool = BufferPool()
    take_in(pool)
    assert pool.stats().in_use_bytes == 1024
    event.done = True
    assert pool.stats().in_use_bytes == 0


def test_a_cpu_has_read_it_at_once() -> None:
    pool = BufferPool()
    take_in(pool)
    assert pool.stats().in_use_bytes == 0


class EndingTransfer:
    """Another thread ends it between any two looks at it."""

    error = None

    def __init__(self) -> None:
        self._states = iter((TransferState.PENDING, TransferState.DONE))

    @property
    def state(self) -> TransferState:
        return next(self._states)


def test_reply_that_arrives_during_a_look_loses_no_server() -> None:
    ending, nothing = EndingTransfer(), SimpleNamespace(server_id="node-0")
    transfer: Any = ending
    unused: Any = nothing
    awaited = replies._RemoteAwaited(unused, unused, {}, unused, unused, transfer, unused)
    assert [awaited.arrived(), awaited.arrived()] == [False, True]
