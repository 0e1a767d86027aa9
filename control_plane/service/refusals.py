"""The refused requests: counted for Prometheus, and logged once for each change of state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from control_plane.errors import RefusedError
from control_plane.metrics.server_metrics import PREFIX
from distca.contract.rpc_errors import Reason
from distca.metric_table import Label, Table, counter

logger = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""A caller that has not been refused for so long has stopped."""

MAX_LOGGED = 256
"""Callers and reasons that are logged apart; what comes on top is only counted."""

_NO_REFUSALS = {Reason.REPLACED, Reason.SHUTTING_DOWN, Reason.STANDBY}
"""Streams that end as they should, and calls that belong to another control plane."""

_LOGGED = {
    Reason.NO_IDENTITY,
    Reason.EXPIRED_CERTIFICATE,
    Reason.NO_HANDSHAKE,
    Reason.WRONG_ROLE,
    Reason.OTHER_OWNER,
    Reason.MISSING_TOKEN,
    Reason.WRONG_TOKEN,
    Reason.TOO_LARGE,
    Reason.RATE_LIMITED,
    Reason.QUOTA,
}
"""The refusals because of who asks, or how much."""


@dataclass
class _Streak:
    count: int
    last: float


class RefusalTable(Table):
    """The refused requests."""

    prefix = PREFIX

    requests_refused_total = counter(
        "Requests that were refused, by method and reason.", Label("method"), Label("reason")
    )


class Refusals:
    """Counts refused requests by method and reason; both come from closed sets.

    Args:
        registry: of the process.
        clock: seconds that never go back.
    """

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._streaks: dict[tuple[str, str, str], _Streak] = {}
        self._refused = RefusalTable(registry).requests_refused_total

    def refused(self, method: str, caller: str, error: RefusedError) -> None:
        """A request was refused.

        Args:
            method: a name from the protocol.
            caller: who it was, for the log.
            error: why.
        """
        if error.reason in _NO_REFUSALS:
            return
        reason = error.reason.kind
        self._refused.labels(method, reason).inc()
        if error.reason in _LOGGED:
            self._log(method, caller, reason, error)

    def sweep(self) -> None:
        """Logs the end of what has stopped."""
        now = self._clock()
        for key, streak in list(self._streaks.items()):
            if now - streak.last > QUIET_SECONDS:
                del self._streaks[key]
                method, caller, reason = key
                logger.info(
                    "%s: no more refused (%s) from %s; %d were",
                    method,
                    reason,
                    caller,
                    streak.count,
                )

    def _log(self, method: str, caller: str, reason: str, error: RefusedError) -> None:
        key = (method, caller, reason)
        streak = self._streaks.get(key)
        if streak is not None:
            streak.count, streak.last = streak.count + 1, self._clock()
        elif len(self._streaks) < MAX_LOGGED:
            self._streaks[key] = _Streak(1, self._clock())
            logger.warning("%s refused to %s (%s): %s", method, caller, reason, error)
