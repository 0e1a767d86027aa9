"""Which of the jobs that a server serves the control plane still knows."""

from __future__ import annotations

from collections.abc import Iterable

from distca.contract.timeouts import default_seconds

PATIENCE_SECONDS = default_seconds("announced_seconds")
"""How long after a registration a job may stay without being announced: its ranks have twice a
lease to come back to a control plane that has started again."""


class AnnouncedJobs:
    """The jobs that were announced since the last registration. Pure state."""

    def __init__(self) -> None:
        self._announced: set[str] = set()
        self._registered_at = 0.0

    def registered(self, *, now: float) -> None:
        """The server has registered; the control plane will announce the jobs that it knows."""
        self._announced = set()
        self._registered_at = now

    def opened(self, job_id: str) -> None:
        """The control plane has announced a job."""
        self._announced.add(job_id)

    def forgotten(self, served: Iterable[str], *, now: float) -> list[str]:
        """Those of the jobs ``served`` of which the control plane should have told by now."""
        if now < self._registered_at + PATIENCE_SECONDS:
            return []
        return sorted(set(served) - self._announced)
