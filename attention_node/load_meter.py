"""A server's load, as the control plane gets it with each heartbeat."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attention_node.executor import Executor
from attention_node.tick_server import TickServer
from data_plane.buffer_pool import BufferPool
from data_plane.standing import call_of_main_thread
from distca.v1 import membership_pb2

logger = logging.getLogger(__name__)

_STALLED_SECONDS = 1.0


class LoadMeter:
    """Measures one server's load.

    Args:
        executor, ticks, pool: the server's.
        moved_bytes: sent and received by its process so far.
        stalled_seconds: how long its process's data plane has been held up.
    """

    def __init__(
        self,
        executor: Executor,
        ticks: TickServer,
        pool: BufferPool,
        moved_bytes: Callable[[], int],
        stalled_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._executor, self._ticks, self._pool = executor, ticks, pool
        self._moved_bytes, self._stalled_seconds = moved_bytes, stalled_seconds
        # At the last reading: time, kernel seconds and bytes moved so far.
        self._read_at = (time.monotonic(), 0.0, 0)

    def read(self) -> membership_pb2.ServerLoad:
        """Returns the load since the last reading; to be called by one thread at a time."""
        executor = self._executor
        now, busy, moved = time.monotonic(), executor.kernel_seconds, self._moved_bytes()
        then, busy_then, moved_then = self._read_at
        self._read_at = (now, busy, moved)
        seconds = max(now - then, 1e-9)
        return membership_pb2.ServerLoad(
            queued_tasks=executor.queued_parts,
            open_ticks=self._ticks.open_ticks,
            busy_ratio=min((busy - busy_then) / seconds, 1.0),
            buffer_bytes=self._pool.stats().in_use_bytes,
            oldest_ready_seconds=executor.oldest_ready_seconds,
            moved_bytes_per_second=max(moved - moved_then, 0) / seconds,
            stands_in=self._stands_in(),
        )

    def _stands_in(self) -> str:
        stalled_seconds = self._stalled_seconds()
        if stalled_seconds < _STALLED_SECONDS:
            return ""
        where = call_of_main_thread()
        logger.warning(
            "the data plane has been held up for %.1f s, and other ranks wait; the main thread "
            "stands in %s",
            stalled_seconds,
            where,
        )
        return where
