"""Back-pressure: receives are posted only when there is memory for them, and later if there is not.

A rank whose message is not received yet waits with it; nothing is lost, and nothing is held twice.
The gate is open where the pool has no limit.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar

from attention_node.tick_memory import TickMemory
from core_attention.tick import Tick
from data_plane.buffer_pool import BufferPool, PooledBuffer, size_class_bytes

logger = logging.getLogger(__name__)

CALM_SECONDS = 10.0
"""So long must no lane have waited before the server counts as no longer overloaded."""

Waiter = TypeVar("Waiter", bound=Hashable)


class MemoryGate(Generic[Waiter]):
    """Gives out the buffers of ticks. Thread-safe; calls nobody while it holds its lock.

    Args:
        pool: of the messages; nothing else may take from it if it is limited.
        live_steps: the planned and unfinished steps, by job and number.
        post: posts what a waiter is still to post; called through ``run_soon``.
        run_soon: runs something on a thread that may post.
        on_waited: told of seconds that a lane has waited for memory with nothing posted.
    """

    def __init__(
        self,
        pool: BufferPool,
        *,
        live_steps: Callable[[], Iterable[tuple[str, int]]],
        post: Callable[[Waiter], None],
        run_soon: Callable[[Callable[[], None]], None],
        on_waited: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._live_steps = live_steps
        self._post = post
        self._run_soon = run_soon
        self._on_waited = on_waited
        self._lock = threading.Lock()
        self._memory = None if pool.limit_bytes is None else TickMemory(pool.limit_bytes)
        self._waiting: dict[Waiter, float | None] = {}
        self._retry_is_due = False
        self._overloaded_since: float | None = None
        self._last_waited = 0.0
        if self._memory is not None:
            pool.on_free(self.changed)

    @property
    def waiting(self) -> int:
        """Who waits for memory now."""
        return len(self._waiting)

    def add_step(self, job_id: str, needs: Mapping[int, Sequence[tuple[Tick, int]]]) -> None:
        """A step is planned; see ``TickMemory.add_step``.

        Raises:
            MemoryTooSmall: it cannot be received.
        """
        if self._memory is None:
            return
        live = list(self._live_steps())
        with self._lock:
            self._memory.keep_steps(live)
            self._memory.add_step(job_id, needs)

    def take(
        self,
        job_id: str,
        tick: Tick,
        sizes: tuple[int, int],
        waiter: Waiter,
        *,
        idle: bool,
    ) -> tuple[PooledBuffer, PooledBuffer | None] | None:
        """Buffers for a rank's part of ``tick``: its request, and its reply if memory is limited
        (else the reply's is taken when it is needed). None if there is no room now: ``waiter``
        will be posted for when there is.

        Args:
            job_id: the job.
            tick: which exchange.
            sizes: bytes of request and reply.
            waiter: who asks.
            idle: nothing is posted for the lane, so that its rank has to wait.

        Raises:
            MemoryError, torch.OutOfMemoryError: the device has none.
        """
        if self._memory is None:
            return self._pool.acquire(sizes[0]), None
        with self._lock:
            if not self._memory.admit(job_id, tick) or self._free_bytes() < pair_bytes(sizes):
                since = self._waiting.get(waiter)
                self._waiting[waiter] = since or (time.monotonic() if idle else None)
                started = idle and self._overloaded_since is None
                if started:
                    self._overloaded_since = time.monotonic()
            else:
                return self._pool.acquire(sizes[0]), self._pool.acquire(sizes[1])
        if started:
            logger.warning(
                "overloaded: messages wait at their senders for memory (limit_bytes=%d, %d in use)",
                self._pool.limit_bytes,
                self._pool.stats().in_use_bytes,
            )
        return None

    def tick_over(self, job_id: str, tick: Tick) -> None:
        """A tick needs no memory any more."""
        if self._memory is not None:
            with self._lock:
                self._memory.end(job_id, tick)
            self.changed()

    def changed(self) -> None:
        """Memory has come back, or steps have ended: those who wait get another chance soon."""
        with self._lock:
            due = bool(self._waiting) and not self._retry_is_due
            self._retry_is_due |= due
        if due:
            self._run_soon(self._retry)

    def _retry(self) -> None:
        live = list(self._live_steps())
        now = time.monotonic()
        with self._lock:
            self._retry_is_due = False
            waiting, self._waiting = self._waiting, {}
            if self._memory is not None:
                self._memory.keep_steps(live)
        for waiter, since in waiting.items():
            if since is not None:
                self._last_waited = now
                self._on_waited(now - since)
            self._post(waiter)
        self._note_calm(now)

    def _note_calm(self, now: float) -> None:
        with self._lock:
            since = self._overloaded_since
            calm = since is not None and now - self._last_waited > CALM_SECONDS
            if calm:
                self._overloaded_since = None
        if calm and since is not None:
            logger.info("no longer overloaded, after %.0f s", now - since)

    def _free_bytes(self) -> int:
        assert self._pool.limit_bytes is not None
        return self._pool.limit_bytes - self._pool.stats().in_use_bytes


def pair_bytes(sizes: Iterable[int]) -> int:
    """What a pool takes for buffers of ``sizes``."""
    return sum(map(size_class_bytes, sizes))
