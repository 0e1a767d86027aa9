"""The metrics of the control plane.

Every label comes from a small set: phases, kinds, states, reasons, and the names of open jobs and
live servers, whose series go when they do. Scraping changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry

from control_plane.cold_start.planner import PlannerState
from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.membership import Member
from control_plane.jobs.step import StepRecord
from control_plane.metrics.job_metrics import JobMetrics
from control_plane.metrics.server_metrics import PREFIX, SERVER_KINDS, ServerMetrics
from distca.contract.server_loss import LossCause
from distca.metric_table import Label, Table, counter, gauge

FAILURE_CAUSES = ("lease_expired", "no_progress", *LossCause)
"""The ways in which a server's failure is noticed: by the control plane, or by a rank."""


SERVER_STATES = ("serving", "draining")

_KIND = Label("kind", ("server", "rank"))


class ControlPlaneTable(Table):
    """Members, jobs and failures."""

    prefix = PREFIX

    servers = gauge(
        "Live attention servers.", Label("kind", SERVER_KINDS), Label("state", SERVER_STATES)
    )
    leases = gauge("Leases that run.", _KIND)
    jobs = gauge("Open jobs.")
    subscribers = gauge("Members that watch for plans.", _KIND)
    registrations_total = counter("Servers and ranks that have joined.", _KIND)
    lease_expirations_total = counter("Leases that ran out.", _KIND)
    subscribers_dropped_total = counter("Streams ended because their reader fell behind.", _KIND)
    jobs_closed_total = counter("Jobs closed.", Label("outcome", ("finished", "failed")))
    failures_detected_total = counter(
        "Servers found to have failed, by what showed it. One that ranks of a job lose counts "
        "once, by what the first of them saw; if its lease then runs out, that counts once more.",
        Label("cause", FAILURE_CAUSES),
    )
    planner_compiled = gauge(
        "1 for a planner that is compiled, 0 while documents are left at home instead.",
        Label("planner"),
    )
    servers_fenced_total = counter(
        "Pool servers shut out until they register again: their lease ran out, or they had work "
        "and finished none."
    )


class Metrics:
    """The metrics, and what changes them.

    Args:
        registry: where they appear; None for one of their own.

    Attributes:
        jobs, servers: those of one job or server.
        series: the others, for what one count says.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.jobs = JobMetrics(self.registry)
        self.servers = ServerMetrics(self.registry)
        self.series = ControlPlaneTable(self.registry)

    def job_opened(self, spec: JobSpec) -> None:
        """A job was created."""
        self.series.jobs.inc()
        self.jobs.opened(spec)

    def job_closed(self, job: Job) -> None:
        """A job was closed; its series go."""
        self.series.jobs.dec()
        self.series.jobs_closed_total.labels("failed" if job.closed else "finished").inc()
        self.jobs.closed(job.spec.name)

    def server_reported(self, job: Job, record: StepRecord, server_id: str) -> None:
        """A live server reported a step for the first time."""
        self.servers.reported(record, server_id, job.spec.n_layers)
        self.jobs.server_reported(job, record)

    def members_changed(self, members: Sequence[Member]) -> None:
        """A server came, went or began to drain."""
        counts = {(kind, state): 0 for kind in SERVER_KINDS for state in SERVER_STATES}
        for member in members:
            kind = "pool" if member.in_place is None else "in_place"
            counts[kind, "draining" if member.draining else "serving"] += 1
        for (kind, state), count in counts.items():
            self.series.servers.labels(kind, state).set(count)
        self.series.leases.labels("server").set(
            counts["pool", "serving"] + counts["pool", "draining"]
        )
        self.servers.changed(members)

    def ranks_changed(self, jobs: Iterable[Job]) -> None:
        """A rank came or went; ``jobs`` are those that are open."""
        jobs = list(jobs)
        self.series.leases.labels("rank").set(sum(len(job.leases.joined) for job in jobs))
        self.jobs.ranks_changed(jobs)

    def subscribers_changed(self, *, ranks: int, servers: int) -> None:
        """A stream began or ended."""
        self.series.subscribers.labels("rank").set(ranks)
        self.series.subscribers.labels("server").set(servers)

    def lease_expired(self, kind: str) -> None:
        """The lease of a ``"rank"`` or a ``"server"`` ran out."""
        self.series.lease_expirations_total.labels(kind).inc()
        if kind == "server":
            self.series.servers_fenced_total.inc()

    def server_lost(self, job: Job, server_id: str, cause: str) -> None:
        """Note a rank's report that ``job`` has lost a server: a failure, unless another reported
        it in the same epoch. The recovery for it begins the next, in which it may be lost again."""
        if self.jobs.note_loss(job, server_id):
            self.series.failures_detected_total.labels(cause).inc()

    def planner_changed(self, name: str, state: PlannerState) -> None:
        """A planner runs in another way than before."""
        self.series.planner_compiled.labels(name).set(state is PlannerState.COMPILED)
