"""Back-pressure: receives are posted only when there is memory for them, and later if there is not.

A rank whose message is not received yet waits with it; nothing is lost, and nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic

from attention_node.machine.instructions import LogLine, ReportWait, RetrySoon
from attention_node.machine.outline import Peer
from attention_node.machine.tick_memory import Lane, TickMemory
from core_attention.tick import Tick

CALM_SECONDS = 10.0
"""So long must no lane have waited before the server counts as no longer overloaded."""


class BackPressure(Generic[Peer]):
    """The ticks that may have memory, and the connections that wait for it.

    Args:
        limit_bytes: most memory for messages; None for no limit.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes
        self._memory = None if limit_bytes is None else TickMemory(limit_bytes)
        # Since when, for those that have nothing posted for a lane.
        self._waiting: dict[Peer, float | None] = {}
        self._retry_is_due = False
        self._overloaded_since: float | None = None
        self._last_waited = 0.0

    def add_step(
        self,
        job_id: str,
        needs: Mapping[Lane, Sequence[tuple[Tick, int]]],
        live: Iterable[tuple[str, int]],
    ) -> None:
        """A step is planned, besides those that are ``live``; see ``TickMemory.add_step``.

        Raises:
            MemoryTooSmall: it cannot be received.
        """
        if self._memory is not None:
            self._memory.keep_steps(live)
            self._memory.add_step(job_id, needs)

    def admit(self, job_id: str, tick: Tick, lane: Lane) -> bool:
        """Returns whether ``tick`` may have memory now in ``lane``."""
        return self._memory is None or self._memory.admit(job_id, tick, lane)

    def wait(self, peer: Peer, *, idle: bool, now: float) -> list[LogLine]:
        """``peer`` waits for memory; ``idle``: with nothing posted for the lane, so that its rank
        has to wait too."""
        self._waiting[peer] = self._waiting.get(peer) or (now if idle else None)
        if not idle or self._overloaded_since is not None:
            return []
        self._overloaded_since = now
        limit = f"limit_bytes={self._limit_bytes}"
        return [
            LogLine(f"overloaded: messages wait at their senders for memory, {limit}", "warning")
        ]

    def tick_over(self, job_id: str, tick: Tick, lane: Lane) -> None:
        """A tick needs no memory any more in ``lane``."""
        if self._memory is not None:
            self._memory.end(job_id, tick, lane)

    def changed(self) -> list[RetrySoon]:
        """Memory has come back, or ticks have ended: those who wait get another chance soon."""
        if not self._waiting or self._retry_is_due:
            return []
        self._retry_is_due = True
        return [RetrySoon()]

    def retry(
        self, live: Iterable[tuple[str, int]], now: float
    ) -> tuple[list[Peer], list[ReportWait | LogLine]]:
        """Takes those who wait, who may wait again; and what there is to report."""
        self._retry_is_due = False
        waiting, self._waiting = self._waiting, {}
        if self._memory is not None:
            self._memory.keep_steps(live)
        reports: list[ReportWait | LogLine] = [
            ReportWait(now - since) for since in waiting.values() if since is not None
        ]
        if reports:
            self._last_waited = now
        since = self._overloaded_since
        if since is not None and now - self._last_waited > CALM_SECONDS:
            self._overloaded_since = None
            reports.append(LogLine(f"no longer overloaded, after {now - since:.0f} s"))
        return list(waiting), reports
