"""A check that calls reach the control plane at all. Pure state: the time comes in.

Members call every third of a lease. If none of several has called for longer than half a lease, it
is not they who are gone: this process was stopped, or its network was cut. It then has no ground to
take away any lease.
"""

from __future__ import annotations


class IsolationDetector:
    """The time of the last call of any member.

    Args:
        lease_seconds: how long a lease runs.
        now: when it begins to listen.
    """

    def __init__(self, *, lease_seconds: float, now: float) -> None:
        self._patience_seconds = lease_seconds / 2
        self._heard_at = now

    def heard(self, *, now: float) -> float:
        """Note a call; returns the seconds without any, 0.0 if that is no wonder."""
        silent_seconds = now - self._heard_at
        self._heard_at = now
        return silent_seconds if silent_seconds > self._patience_seconds else 0.0

    def is_isolated(self, n_members: int, *, now: float) -> bool:
        """Return whether it is rather this process than all ``n_members`` that is cut off. One
        alone may well be gone."""
        return n_members > 1 and now - self._heard_at > self._patience_seconds
