"""The ranks of a job: leases, ranks that have left, ranks that are to come back.

Pure state: the time comes in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from control_plane.errors import InvalidRequestError, RefusedError
from distca.contract.rpc_errors import Reason

_SAME_TIME_SECONDS = 5.0
"""A server's loss that is older has another cause than the stream's."""


@dataclass
class RankLease:
    """A rank that has joined.

    Attributes:
        rank, lease_id, host: of the rank.
        renewed_at: since when its lease runs.
        heard_at: when the rank has last called; a lease may begin again without that.
        has_watched: whether it has ever opened its stream of events.
        away_since: when that stream has broken, if it has opened no other.
    """

    rank: int
    lease_id: str
    host: str
    renewed_at: float
    heard_at: float
    has_watched: bool = False
    away_since: float | None = None

    @property
    def is_away(self) -> bool:
        """Return whether its stream of events has broken, and it has opened no other."""
        return self.away_since is not None

    def broken_for(self, now: float) -> float:
        """The seconds without a call since its stream broke; 0.0 if it has called."""
        since = self.away_since
        return 0.0 if since is None or not self.is_silent else now - since

    @property
    def is_silent(self) -> bool:
        """Return whether it has not called since its stream broke."""
        return self.away_since is not None and self.heard_at <= self.away_since


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The time in which a rank whose stream of events has broken must call again.

    Attributes:
        broken_seconds: if nothing else is known of it.
        lost_seconds: if servers have lost it, too, at about that time.
        lost: ranks that servers have lost, and when they said so.
    """

    broken_seconds: float = math.inf
    lost_seconds: float = math.inf
    lost: Mapping[int, float] = field(default_factory=dict)

    def seconds(self, lease: RankLease) -> float:
        """The seconds for the rank of ``lease``."""
        told_at = self.lost.get(lease.rank, -math.inf)
        is_lost = lease.away_since is not None and told_at > lease.away_since - _SAME_TIME_SECONDS
        return min(self.broken_seconds, self.lost_seconds) if is_lost else self.broken_seconds


class RankLeases:
    """The ranks of one job.

    Args:
        job_id, n_ranks: of the job.
        lease_seconds: how long a rank lives without renewal.
        absent: ranks that are to come back, because they were there under a control plane before.

    Attributes:
        left: ranks that have left.
        absent: ranks that have not come back yet.
    """

    def __init__(
        self, job_id: str, n_ranks: int, *, lease_seconds: float, absent: frozenset[int]
    ) -> None:
        self._job_id = job_id
        self._n_ranks = n_ranks
        self._lease_seconds = lease_seconds
        self._by_id: dict[str, RankLease] = {}
        self.left: set[int] = set()
        self.absent = set(absent)

    def why_taken(self, rank: int) -> str | None:
        """The reason why ``rank`` cannot join for the first time; None if it can. One that has
        joined and
        never watched gives its place up: its process is gone, or did not get the answer."""
        self._check_rank(rank)
        if rank in self.absent:
            return (
                f"rank {rank} of job {self._job_id} is to come back with its token, after the "
                "control plane was away"
            )
        if rank in self.left:
            return self._why_left(rank)
        lease = self.of_rank(rank)
        if lease is not None and lease.has_watched:
            return f"rank {rank} has joined job {self._job_id} from {lease.host}"
        return None

    def join(self, rank: int, *, host: str, lease_id: str, now: float) -> None:
        """A rank joins."""
        why = self.why_taken(rank)
        if why is not None:
            raise RefusedError(Reason.ALREADY_EXISTS, why)
        self._give(rank, host, lease_id, now)

    def come_back(self, rank: int, *, host: str, lease_id: str, now: float) -> None:
        """A rank comes back, under a new lease."""
        self._check_rank(rank)
        if rank in self.left:
            raise RefusedError(
                Reason.ALREADY_EXISTS,
                f"{self._why_left(rank)}; wait until it is closed, or use another name",
            )
        self.absent.discard(rank)
        self._give(rank, host, lease_id, now)

    def renew(self, lease_id: str, *, now: float) -> None:
        """Begin a rank's lease again, as it has called."""
        lease = self.get(lease_id, now=now)
        lease.renewed_at = lease.heard_at = now

    def get(self, lease_id: str, *, now: float) -> RankLease:
        """The rank that holds ``lease_id``."""
        lease = self._by_id.get(lease_id)
        if lease is None or self._expired(lease, now):
            raise RefusedError(
                Reason.LEASE_EXPIRED,
                f"no rank of job {self._job_id} holds the lease that came; it expired after "
                f"{self._lease_seconds:g} s without renewal, or the rank has left",
            )
        return lease

    def renew_all(self, *, now: float) -> None:
        """Begin all leases again."""
        for lease in self._by_id.values():
            lease.renewed_at = now

    def of_rank(self, rank: int) -> RankLease | None:
        """The lease of ``rank``, expired or not."""
        for lease in self._by_id.values():
            if lease.rank == rank:
                return lease
        return None

    def watched_by(self, rank: int) -> None:
        """Note that a rank has opened its stream of events."""
        lease = self.of_rank(rank)
        if lease is not None:
            lease.has_watched, lease.away_since = True, None

    def stream_broken(self, rank: int, *, now: float) -> None:
        """Note that a rank's stream of events has broken: its process is gone, or its network."""
        lease = self.of_rank(rank)
        if lease is not None:
            lease.away_since = now

    def rank_of(self, lease_id: str) -> int | None:
        """The rank that holds ``lease_id``, expired or not; None if none does."""
        lease = self._by_id.get(lease_id)
        return None if lease is None else lease.rank

    def leave(self, lease_id: str, *, now: float) -> int:
        """A rank leaves; returns it."""
        rank = self.get(lease_id, now=now).rank
        del self._by_id[lease_id]
        self.left.add(rank)
        return rank

    def gone(self, patience: Patience, *, now: float) -> list[RankLease]:
        """The ranks that count as dead, in rank order: their lease has run out, or they have
        not called for too long since their stream broke."""
        gone = [
            lease
            for lease in self._by_id.values()
            if self._expired(lease, now) or lease.broken_for(now) > patience.seconds(lease)
        ]
        return sorted(gone, key=lambda lease: lease.rank)

    @property
    def is_broken(self) -> bool:
        """Return whether a rank is silent, or is to come back."""
        return bool(self.absent) or any(lease.is_silent for lease in self._by_id.values())

    @property
    def away(self) -> list[int]:
        """The ranks that hold a lease and have lost their stream of events."""
        return sorted(lease.rank for lease in self._by_id.values() if lease.is_away)

    @property
    def gather(self) -> bool:
        """Return whether a rank has never joined, nor is to come back."""
        return len(self._by_id) + len(self.left | self.absent) < self._n_ranks

    @property
    def joined(self) -> list[int]:
        """The ranks that hold a lease."""
        return sorted(lease.rank for lease in self._by_id.values())

    @property
    def hosts(self) -> tuple[str, ...] | None:
        """The host of every rank; None unless all hold a lease."""
        hosts = {lease.rank: lease.host for lease in self._by_id.values()}
        if len(hosts) < self._n_ranks:
            return None
        return tuple(hosts[rank] for rank in range(self._n_ranks))

    def _give(self, rank: int, host: str, lease_id: str, now: float) -> None:
        before = self.of_rank(rank)
        if before is not None:
            del self._by_id[before.lease_id]
        self._by_id[lease_id] = RankLease(rank, lease_id, host, now, now)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._n_ranks:
            raise InvalidRequestError(
                f"rank is {rank}; job {self._job_id} has ranks 0 to {self._n_ranks - 1}"
            )

    def _why_left(self, rank: int) -> str:
        return f"rank {rank} has left job {self._job_id}, which ranks {self.joined} still run"

    def _expired(self, lease: RankLease, now: float) -> bool:
        return now - lease.renewed_at > self._lease_seconds
