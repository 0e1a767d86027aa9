"""The event streams of ranks and servers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from control_plane.errors import RefusedError
from control_plane.jobs.job import Job
from control_plane.jobs.membership import Member, Membership
from control_plane.jobs.subscriptions import Event, Subscription, Subscriptions
from control_plane.metrics.metrics import Metrics

logger = logging.getLogger(__name__)

RankKey = tuple[str, int]
"""Job id and rank."""


class EventStreams:
    """The streams of ranks and of pool servers. Telling who does not watch does nothing: what a
    member needs is given to it when it begins to watch."""

    def __init__(self, membership: Membership, metrics: Metrics, *, max_queued_events: int) -> None:
        self._membership = membership
        self._metrics = metrics
        self._ranks: Subscriptions[RankKey] = Subscriptions(limit=max_queued_events)
        self._servers: Subscriptions[str] = Subscriptions(limit=max_queued_events)

    def watch_rank(
        self, job: Job, rank: int, first: Sequence[Event]
    ) -> tuple[RankKey, Subscription]:
        """Opens the stream of a rank, which begins with ``first``."""
        key = (job.job_id, rank)
        subscription = self._ranks.open(key, first)
        self._count()
        return key, subscription

    def watch_server(self, member: Member, first: Sequence[Event]) -> tuple[str, Subscription]:
        """Opens the stream of a pool server, which begins with ``first``."""
        subscription = self._servers.open(member.lease_id, first)
        self._count()
        return member.lease_id, subscription

    @property
    def is_watched(self) -> bool:
        """Return whether any member has an open stream."""
        return bool(len(self._ranks) or len(self._servers))

    def discard(self, key: RankKey | str, subscription: Subscription) -> bool:
        """The reader of ``subscription`` has gone; returns whether the member has no other."""
        if isinstance(key, str):
            was_its_own = self._servers.discard(key, subscription)
        else:
            was_its_own = self._ranks.discard(key, subscription)
        self._count()
        return was_its_own

    def send_to_rank(self, job: Job, rank: int, event: bytes) -> None:
        """Queues ``event`` for a rank."""
        if not self._ranks.publish((job.job_id, rank), event):
            logger.warning("job %s: rank %d was dropped, it reads no events", job.job_id, rank)
            self._metrics.series.subscribers_dropped_total.labels("rank").inc()
            self._count()

    def send_to_ranks(self, job: Job, event: bytes) -> None:
        """Queues ``event`` for all ranks of ``job``."""
        for rank in job.leases.joined:
            self.send_to_rank(job, rank, event)

    def send_to_server(self, member: Member, event: bytes) -> None:
        """Queues ``event`` for a pool server."""
        if not self._servers.publish(member.lease_id, event):
            logger.warning("server %s was dropped, it reads no events", member.server_id)
            self._metrics.series.subscribers_dropped_total.labels("server").inc()
            self._count()

    def send_to_pool(self, event: bytes) -> None:
        """Queues ``event`` for all pool servers, draining ones too."""
        for member in self._membership.members():
            if member.in_place is None:
                self.send_to_server(member, event)

    def end_rank(self, job: Job, rank: int) -> None:
        """Ends the stream of a rank after what is queued."""
        self._ranks.end((job.job_id, rank))
        self._count()

    def end_server(self, member: Member, error: RefusedError | None = None) -> None:
        """Ends the stream of a pool server, with ``error`` if given."""
        self._servers.end(member.lease_id, error)
        self._count()

    def end_all(self, error: RefusedError) -> None:
        """Ends every stream with ``error``."""
        self._ranks.end_all(error)
        self._servers.end_all(error)
        self._count()

    def _count(self) -> None:
        self._metrics.subscribers_changed(ranks=len(self._ranks), servers=len(self._servers))
