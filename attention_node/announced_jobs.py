"""The jobs of a server that the control plane still knows."""

from __future__ import annotations

from collections.abc import Iterable

from distca.contract.timeouts import default_seconds

PATIENCE_SECONDS = default_seconds("announced_seconds")
"""How long after a registration a job may stay without being announced: its ranks have twice a
lease to come back to a control plane that has started again."""


class AnnouncedJobs:
    """The jobs that were announced since the last registration. Pure state."""

    def __init__(self) -> None:
        self._announced: dict[str, str] = {}
        self._registered_at = 0.0

    def registered(self, *, now: float) -> None:
        """The server has registered; the control plane will announce the jobs that it knows."""
        self._announced = {}
        self._registered_at = now

    def opened(self, job_id: str, owner: str) -> None:
        """The control plane has announced a job of the identity ``owner``."""
        self._announced[job_id] = owner

    def owner(self, job_id: str) -> str:
        """The identity behind a job that was announced; empty for others."""
        return self._announced.get(job_id, "")

    def forgotten(self, served: Iterable[str], *, now: float) -> list[str]:
        """Those of the jobs ``served`` that should have been announced by now."""
        if now < self._registered_at + PATIENCE_SECONDS:
            return []
        return sorted(set(served) - self._announced.keys())
