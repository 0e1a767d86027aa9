"""A token bucket for each caller. Pure: time comes in."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MAX_CALLERS = 4096
"""Callers with a rate of their own; the one that was idle longest is forgotten first."""


@dataclass
class _Bucket:
    tokens: float
    filled_at: float


class RateLimit:
    """Admits ``burst`` calls of a caller at once, and ``per_second`` of them in the long run."""

    def __init__(self, *, per_second: float, burst: int) -> None:
        self._per_second = per_second
        self._burst = burst
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_seconds(self, caller: str, *, now: float) -> float:
        """0 if ``caller`` may call now, which counts as a call; else how long it must wait."""
        bucket = self._buckets.pop(caller, None) or _Bucket(self._burst, now)
        self._buckets[caller] = bucket
        while len(self._buckets) > MAX_CALLERS:
            self._buckets.popitem(last=False)
        gained = (now - bucket.filled_at) * self._per_second
        bucket.tokens, bucket.filled_at = min(bucket.tokens + gained, self._burst), now
        if bucket.tokens >= 1:
            bucket.tokens -= 1
            return 0.0
        return (1 - bucket.tokens) / self._per_second
