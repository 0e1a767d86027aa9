"""What Prometheus can read about the control plane.

Every label comes from a small set: phases, kinds, states, reasons, and the names of open jobs and
live servers, whose series go when they do. Scraping changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge

from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.membership import Member
from control_plane.jobs.publication import Publication
from control_plane.jobs.step import PlannedStep
from control_plane.metrics.job_metrics import JobMetrics
from control_plane.metrics.metric_set import PREFIX
from control_plane.metrics.server_metrics import ServerMetrics

FAILURE_CAUSES = ("lease_expired", "transport_error", "deadline", "no_progress", "corrupt_result")
"""How a server's failure is noticed."""


class Metrics:
    """The metrics, and what changes them.

    Args:
        registry: where they appear; None for one of their own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._of_jobs = JobMetrics(self.registry)
        self._of_servers = ServerMetrics(self.registry)
        self._servers = self._gauge("servers", "Live attention servers.", "kind", "state")
        self._leases = self._gauge("leases", "Leases that run.", "kind")
        self._jobs = self._gauge("jobs", "Open jobs.")
        self._subscribers = self._gauge("subscribers", "Members that watch for plans.", "kind")
        self._registrations = self._counter(
            "registrations_total", "Servers and ranks that have joined.", "kind"
        )
        self._expirations = self._counter("lease_expirations_total", "Leases that ran out.", "kind")
        self._dropped = self._counter(
            "subscribers_dropped_total", "Streams ended because their reader fell behind.", "kind"
        )
        self._closed = self._counter("jobs_closed_total", "Jobs closed.", "outcome")
        self._failures = self._counter(
            "failures_detected_total", "Servers found to have failed, by what showed it.", "cause"
        )
        self._fenced = self._counter(
            "servers_fenced_total", "Servers shut out until they register again."
        )
        for kind in ("server", "rank"):
            for metric in (
                self._leases,
                self._subscribers,
                self._registrations,
                self._expirations,
                self._dropped,
            ):
                metric.labels(kind)
        for outcome in ("finished", "failed"):
            self._closed.labels(outcome)
        for cause in FAILURE_CAUSES:
            self._failures.labels(cause)
        self.members_changed(())

    def job_opened(self, spec: JobSpec) -> None:
        """A job was created."""
        self._jobs.inc()
        self._of_jobs.opened(spec)

    def job_closed(self, job: Job) -> None:
        """A job was closed; its series go."""
        self._jobs.dec()
        self._closed.labels("failed" if job.closed else "finished").inc()
        self._of_jobs.closed(job.spec.name)

    def manifest_received(self, job: Job) -> None:
        """A rank handed in a manifest."""
        self._of_jobs.manifest_received(job)

    def step_ready(self, job: Job, step: int) -> None:
        """The last manifest of a step is here: it can be planned."""
        self._of_jobs.step_ready(job, step)

    def step_planned(self, job: Job, publication: Publication) -> None:
        """A plan was made and published."""
        self._of_jobs.step_planned(job, publication)

    def plan_failed(self, job: Job, step: int) -> None:
        """No plan could be made for a step."""
        self._of_jobs.plan_failed(job, step)

    def step_replanned(self, job: Job, epoch: int) -> None:
        """A step was planned again, under a higher epoch."""
        self._of_jobs.step_replanned(job, epoch)

    def rank_reported(self, job: Job, record: PlannedStep) -> None:
        """A rank reported a step for the first time."""
        self._of_jobs.rank_reported(job, record)

    def server_reported(self, job: Job, record: PlannedStep, server_id: str) -> None:
        """A live server reported a step for the first time."""
        self._of_servers.reported(record, server_id, job.spec.n_layers)
        self._of_jobs.server_reported(job, record)

    def registered(self, kind: str) -> None:
        """A ``"rank"`` or a pool ``"server"`` joined."""
        self._registrations.labels(kind).inc()

    def heartbeat(self, member: Member) -> None:
        """A server reported its load."""
        self._of_servers.heartbeat(member)

    def members_changed(self, members: Sequence[Member]) -> None:
        """A server came, went or began to drain."""
        counts = {
            (kind, state): 0 for kind in ("pool", "in_place") for state in ("serving", "draining")
        }
        for member in members:
            kind = "pool" if member.in_place is None else "in_place"
            counts[kind, "draining" if member.draining else "serving"] += 1
        for (kind, state), count in counts.items():
            self._servers.labels(kind, state).set(count)
        self._leases.labels("server").set(counts["pool", "serving"] + counts["pool", "draining"])
        self._of_servers.changed(members)

    def ranks_changed(self, jobs: Iterable[Job]) -> None:
        """A rank came or went; ``jobs`` are those that are open."""
        jobs = list(jobs)
        self._leases.labels("rank").set(sum(len(job.joined_ranks) for job in jobs))
        self._of_jobs.ranks_changed(jobs)

    def subscribers_changed(self, *, ranks: int, servers: int) -> None:
        """A stream began or ended."""
        self._subscribers.labels("rank").set(ranks)
        self._subscribers.labels("server").set(servers)

    def subscriber_dropped(self, kind: str) -> None:
        """A stream was ended because its reader fell behind."""
        self._dropped.labels(kind).inc()

    def lease_expired(self, kind: str) -> None:
        """The lease of a ``"rank"`` or a ``"server"`` ran out."""
        self._expirations.labels(kind).inc()

    def failure_detected(self, cause: str) -> None:
        """A server was found to have failed, by one of :data:`FAILURE_CAUSES`."""
        self._failures.labels(cause).inc()

    def server_fenced(self) -> None:
        """A server was shut out until it registers again."""
        self._fenced.inc()

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)
