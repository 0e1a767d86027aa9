"""What a server tells the control plane of its load, since it told it last."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from attention_node.executor import Executor, KernelCall
from attention_node.tick_server import TickServer
from data_plane.buffer_pool import BufferPool
from data_plane.standing import call_of_main_thread
from distca.v1 import membership_pb2

logger = logging.getLogger(__name__)

_STALLED_SECONDS = 1.0


class LoadMeter:
    """Measures one server's load.

    Args:
        moved_bytes: sent and received by its process so far.
        stalled_seconds: how long its process's data plane has been held up.
    """

    def __init__(
        self,
        moved_bytes: Callable[[], int],
        stalled_seconds: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._moved_bytes, self._stalled_seconds = moved_bytes, stalled_seconds
        self._busy_seconds = 0.0
        # At the last reading: time, kernel seconds and bytes moved so far.
        self._read_at = (time.monotonic(), 0.0, 0)

    def kernel_called(self, call: KernelCall) -> None:
        """The server was busy."""
        self._busy_seconds += call.seconds

    def read(
        self, executor: Executor, ticks: TickServer, pool: BufferPool
    ) -> membership_pb2.ServerLoad:
        """The load since the last reading; to be called by one thread at a time."""
        now, busy, moved = time.monotonic(), self._busy_seconds, self._moved_bytes()
        then, busy_then, moved_then = self._read_at
        self._read_at = (now, busy, moved)
        seconds = max(now - then, 1e-9)
        return membership_pb2.ServerLoad(
            queued_tasks=executor.queued_parts,
            open_ticks=ticks.open_ticks,
            busy_ratio=min((busy - busy_then) / seconds, 1.0),
            buffer_bytes=pool.stats().in_use_bytes,
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
