"""Which ranks of a job are there: leases, ranks that have left, ranks that are to come back.

Pure state: the time comes in.
"""

from __future__ import annotations

from dataclasses import dataclass

from control_plane.errors import AlreadyExistsError, InvalidRequestError, LeaseExpiredError


@dataclass
class RankLease:
    """A rank that has joined."""

    rank: int
    lease_id: str
    host: str
    renewed_at: float


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

    def check_can_join(self, rank: int) -> None:
        """Raises unless ``rank`` may join for the first time.

        Raises:
            InvalidRequestError: it is none of the job's ranks.
            AlreadyExistsError: it has joined, or has left already, or is to come back.
        """
        self._check_rank(rank)
        if rank in self.absent:
            raise AlreadyExistsError(
                f"rank {rank} of job {self._job_id} is to come back with its token, after the "
                f"control plane was away; if that process is gone, wait up to "
                f"{2 * self._lease_seconds:g} s, or use another name"
            )
        lease = self.of_rank(rank)
        if lease is not None:
            raise AlreadyExistsError(
                f"rank {rank} has joined job {self._job_id} from {lease.host}; wait up to "
                f"{self._lease_seconds:g} s if that process is gone, or use another name"
            )

    def join(self, rank: int, *, host: str, lease_id: str, now: float) -> None:
        """A rank joins; raises as :meth:`check_can_join`."""
        self.check_can_join(rank)
        self._by_id[lease_id] = RankLease(rank, lease_id, host, now)

    def come_back(self, rank: int, *, host: str, lease_id: str, now: float) -> None:
        """A rank comes back, under a new lease.

        Raises:
            InvalidRequestError: it is none of the job's ranks.
            AlreadyExistsError: it has left.
        """
        self._check_rank(rank)
        lease = self.of_rank(rank)
        if lease is not None:
            del self._by_id[lease.lease_id]
        self.absent.discard(rank)
        self._by_id[lease_id] = RankLease(rank, lease_id, host, now)

    def get(self, lease_id: str, *, now: float) -> RankLease:
        """The rank that holds ``lease_id``.

        Raises:
            LeaseExpiredError: it expired or is unknown.
        """
        lease = self._by_id.get(lease_id)
        if lease is None or self._expired(lease, now):
            raise LeaseExpiredError(
                f"no rank of job {self._job_id} holds the lease that came; it expired after "
                f"{self._lease_seconds:g} s without renewal, or the rank has left"
            )
        return lease

    def renew_all(self, *, now: float) -> None:
        """All leases begin anew."""
        for lease in self._by_id.values():
            lease.renewed_at = now

    def of_rank(self, rank: int) -> RankLease | None:
        """The lease of ``rank``, expired or not."""
        for lease in self._by_id.values():
            if lease.rank == rank:
                return lease
        return None

    def rank_of(self, lease_id: str) -> int | None:
        """The rank that holds ``lease_id``, expired or not; None if none does."""
        lease = self._by_id.get(lease_id)
        return None if lease is None else lease.rank

    def leave(self, lease_id: str, *, now: float) -> int:
        """A rank leaves; returns it. Raises as :meth:`get`."""
        rank = self.get(lease_id, now=now).rank
        del self._by_id[lease_id]
        self.left.add(rank)
        return rank

    def expired(self, *, now: float) -> list[RankLease]:
        """The ranks whose lease has run out, in rank order."""
        gone = [lease for lease in self._by_id.values() if self._expired(lease, now)]
        return sorted(gone, key=lambda lease: lease.rank)

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

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._n_ranks:
            raise InvalidRequestError(
                f"rank is {rank}; job {self._job_id} has ranks 0 to {self._n_ranks - 1}"
            )
        if rank in self.left:
            raise AlreadyExistsError(
                f"rank {rank} has left job {self._job_id}, which ranks {self.joined} still run; "
                "wait until it is closed, or use another name"
            )

    def _expired(self, lease: RankLease, now: float) -> bool:
        return now - lease.renewed_at > self._lease_seconds
