"""The buffers of messages: a request's and its reply's together where memory is limited."""

from __future__ import annotations

import threading
from collections.abc import Callable

from attention_node.served_job import MessagePair
from data_plane.buffer_pool import BufferPool, BufferPoolExhausted, PooledBuffer


class MessageMemory:
    """Gives out the buffers of receives. Thread-safe.

    Args:
        pool: of the messages; nothing else may take from it if it is limited.
        on_free: called when a buffer of a limited pool has come back.
    """

    def __init__(self, pool: BufferPool, on_free: Callable[[], None]) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        if pool.limit_bytes is not None:
            pool.on_free(on_free)

    def has_room(self, messages: MessagePair) -> bool:
        """Returns whether there is memory for ``messages`` now."""
        room_bytes = self._pool.room_bytes
        return room_bytes is None or room_bytes >= messages.pool_bytes

    def take(self, messages: MessagePair) -> tuple[PooledBuffer, PooledBuffer | None] | None:
        """The request's buffer, and the reply's if memory is limited (else it is taken when it is
        needed). None if there is no room.

        Raises:
            MemoryError, torch.OutOfMemoryError: the device has none.
        """
        if self._pool.limit_bytes is None:
            return self._pool.acquire(messages.request.nbytes), None
        with self._lock:
            if not self.has_room(messages):
                return None
            try:
                request = self._pool.acquire(messages.request.nbytes)
                try:
                    return request, self._pool.acquire(messages.reply.nbytes)
                except BaseException:
                    request.release()
                    raise
            except BufferPoolExhausted:
                # A plan has set memory aside since.
                return None
