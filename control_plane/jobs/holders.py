"""Whoever has a name that another one asks for: is it alive, or gone without a word?

A process that was killed keeps its lease until that runs out. Whoever asks for its name meanwhile,
such as the same process started again, is told to wait. After a whole lease every holder has lost
its lease, unless it was heard since: then it is alive, and the name is refused for good.

Pure functions: the time comes in.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

ASKED_PER_SECOND = 100
"""So often all those who wait for one job ask in total; registrations are limited to more."""

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.05, 1.0


def are_alive(
    heard_at: Iterable[float], *, lease_seconds: float, waited_seconds: float, now: float
) -> bool:
    """Whether it is certain that holders of a name live.

    Args:
        heard_at: when each has last called itself.
        lease_seconds: of their leases.
        waited_seconds: for how long their name has been waited for.
        now: the time.
    """
    began = now - waited_seconds
    return waited_seconds >= lease_seconds and all(at > began for at in heard_at)


def retry_seconds(
    ends_at: float,
    *,
    n_waiting: int,
    lease_seconds: float,
    now: float,
    draw: Callable[[], float] = random.random,
) -> float:
    """When to ask again.

    The time is random, so that some of many always ask: a control plane that hears nobody for half
    a lease would take itself for cut off, and let all leases begin anew.

    Args:
        ends_at: when the holder has ended at the latest, unless it is heard.
        n_waiting: how many may wait for its name.
        lease_seconds: of its lease.
        now: the time.
        draw: gives a random number below 1.
    """
    longest = max(min(_LONGEST_SECONDS, lease_seconds / 4), 2 * n_waiting / ASKED_PER_SECOND)
    # A little later than a lease's last moment, in which it still counts.
    left = max(ends_at - now, 0.0) + _SHORTEST_SECONDS
    return min(left, _SHORTEST_SECONDS + longest * draw())
