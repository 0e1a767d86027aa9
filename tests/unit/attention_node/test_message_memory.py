"""Buffers of receives in a limited pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from attention_node.message_memory import MessageMemory
from data_plane.buffer_pool import BufferPool, size_class_bytes


def messages(request: int, reply: int) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(nbytes=request),
        reply=SimpleNamespace(nbytes=reply),
        pool_bytes=size_class_bytes(request) + size_class_bytes(reply),
    )


def test_both_are_taken_or_none() -> None:
    pool = BufferPool(limit_bytes=8192)
    memory = MessageMemory(pool, lambda: None)
    taken = memory.take(messages(4096, 2048))
    assert taken is not None
    assert pool.stats().in_use_bytes == 6144
    assert memory.take(messages(1024, 2048)) is None
    assert pool.stats().in_use_bytes == 6144


def test_a_closed_pool_has_no_room() -> None:
    """Whoever is refused asks again for as long as there is."""
    pool = BufferPool(limit_bytes=8192)
    memory = MessageMemory(pool, lambda: None)
    pool.close()
    assert not memory.has_room(messages(256, 256))
    assert memory.take(messages(256, 256)) is None


@pytest.mark.parametrize(("request_bytes", "reply_bytes"), [(4096, 256), (256, 4096)])
def test_memory_that_was_set_aside_meanwhile_is_no_room(
    monkeypatch: pytest.MonkeyPatch, request_bytes: int, reply_bytes: int
) -> None:
    """And no reason to close the rank's connection."""
    pool = BufferPool(limit_bytes=8192)
    memory = MessageMemory(pool, lambda: None)
    held = pool.acquire(6144)
    monkeypatch.setattr(memory, "has_room", lambda messages: True)
    assert memory.take(messages(request_bytes, reply_bytes)) is None
    assert pool.stats().in_use_bytes == 6144
    held.release()
    assert memory.take(messages(request_bytes, reply_bytes)) is not None
