"""Servers that a job leaves alone for a while, because its ranks cannot reach them. Pure state."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Term:
    seconds: float
    begin: float

    @property
    def until(self) -> float:
        return self.begin + self.seconds


class Quarantine:
    """The servers of the pool that one job does not use now, though they hold a lease.

    A server that ranks report as lost may be cut off from them only, or may be dead without its
    lease having run out. It is left out for :attr:`FIRST_SECONDS`, for twice as long each time that
    it is reported again, up to :attr:`LONGEST_SECONDS`.
    """

    FIRST_SECONDS = 10.0
    LONGEST_SECONDS = 300.0

    def __init__(self) -> None:
        self._terms: dict[str, _Term] = {}

    def add(self, server_id: str, *, now: float) -> float:
        """A rank has lost ``server_id``; returns for how many seconds it is left out. Reports that
        come while it is left out already are of the same loss."""
        term = self._terms.get(server_id)
        if term is None:
            seconds = self.FIRST_SECONDS
        elif now < term.until:
            return term.until - now
        else:
            seconds = min(2 * term.seconds, self.LONGEST_SECONDS)
        self._terms[server_id] = _Term(seconds, now)
        return seconds

    def clear(self, server_id: str) -> None:
        """Forget a server's failures, since it has registered again."""
        self._terms.pop(server_id, None)

    def holds(self, server_id: str, *, heard_at: float, now: float) -> bool:
        """Return whether ``server_id``, which last called at ``heard_at``, is left out."""
        term = self._terms.get(server_id)
        return term is not None and (now < term.until or heard_at <= term.begin)
