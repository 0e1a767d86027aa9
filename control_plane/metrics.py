"""What Prometheus can read about the control plane, on a registry of its own.

Every label comes from a small set: phases, kinds, states, and the names of open jobs, whose series
go when the job does. Scraping changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from control_plane.job import Job
from control_plane.job_spec import JobSpec
from control_plane.membership import Member
from control_plane.publication import Publication
from control_plane.step import PlannedStep
from core_attention.ca_task import Phase
from core_attention.plan import PhaseForecast

Metric = TypeVar("Metric", bound=MetricWrapperBase)

_PREFIX = "distca_control_plane"
_PLAN_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """The metrics, and what changes them. A job's series begin with :meth:`job_opened`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._job_series: list[MetricWrapperBase] = []
        by_phase = ("job_name", "phase")
        self._home_imbalance = self._gauge(
            "home_imbalance_ratio",
            "Max over mean busy seconds of the ranks if nothing moved, in the last planned step.",
            by_phase,
        )
        self._predicted_imbalance = self._gauge(
            "predicted_imbalance_ratio",
            "Max over mean busy seconds of the servers that the last plan predicts.",
            by_phase,
        )
        self._measured_imbalance = self._gauge(
            "measured_imbalance_ratio",
            "Max over mean busy seconds of the servers, in the last step that all have reported.",
            by_phase,
        )
        self._moved_bytes = self._gauge(
            "predicted_moved_bytes",
            "Bytes that the last plan moves between processes in one layer, both ways.",
            by_phase,
        )
        self._tolerance = self._gauge(
            "tolerance_ratio", "By how much the busiest server may exceed the mean.", ("job_name",)
        )
        self._plan_bytes = self._gauge(
            "plan_bytes", "Bytes of all slices of the last plan.", ("job_name",)
        )
        self._step_seconds = self._gauge(
            "step_seconds",
            "Wall seconds of the slowest rank, in the last step that all have reported.",
            ("job_name",),
        )
        self._wait_seconds = self._gauge(
            "wait_seconds",
            "Seconds that the rank which waited longest was blocked on core attention, likewise.",
            ("job_name",),
        )
        self._manifests = self._counter(
            "manifests_total", "Manifests that ranks have handed in.", ("job_name",)
        )
        self._steps_planned = self._counter("steps_planned_total", "Plans made.", ("job_name",))
        self._plans_failed = self._counter(
            "plans_failed_total", "Steps for which no plan could be made.", ("job_name",)
        )
        self._plan_seconds = Histogram(
            f"{_PREFIX}_plan_seconds",
            "Wall seconds to merge a step's manifests and plan it.",
            registry=self.registry,
            buckets=_PLAN_SECONDS_BUCKETS,
        )
        self._servers = self._gauge(
            "servers", "Live attention servers.", ("kind", "state"), of_job=False
        )
        self._leases = self._gauge("leases", "Leases that run.", ("kind",), of_job=False)
        self._jobs = self._gauge("jobs", "Open jobs.", (), of_job=False)
        self._subscribers = self._gauge(
            "subscribers", "Members that watch for plans.", ("kind",), of_job=False
        )
        self._expirations = self._counter(
            "lease_expirations_total", "Leases that ran out.", ("kind",), of_job=False
        )
        self._dropped = self._counter(
            "subscribers_dropped_total",
            "Streams ended because their reader fell behind.",
            ("kind",),
            of_job=False,
        )
        self._closed = self._counter(
            "jobs_closed_total", "Jobs closed.", ("outcome",), of_job=False
        )
        for kind in ("server", "rank"):
            for metric in (self._leases, self._subscribers, self._expirations, self._dropped):
                metric.labels(kind)
        for outcome in ("finished", "failed"):
            self._closed.labels(outcome)
        self.members_changed(())

    def job_opened(self, spec: JobSpec) -> None:
        """A job was created."""
        self._jobs.inc()
        self._tolerance.labels(spec.name).set(spec.options.tolerance)
        for counter in (self._manifests, self._steps_planned, self._plans_failed):
            counter.labels(spec.name)

    def job_closed(self, job: Job) -> None:
        """A job was closed; its series go."""
        self._jobs.dec()
        self._closed.labels("failed" if job.closed else "finished").inc()
        for metric in self._job_series:
            metric.remove_by_labels({"job_name": job.spec.name})

    def manifest_received(self, job_name: str) -> None:
        """A rank handed in a manifest."""
        self._manifests.labels(job_name).inc()

    def step_planned(self, job_name: str, publication: Publication) -> None:
        """A plan was made and published."""
        record = publication.record
        self._steps_planned.labels(job_name).inc()
        self._plan_seconds.observe(record.plan_seconds)
        self._plan_bytes.labels(job_name).set(publication.plan_bytes)
        for phase in Phase:
            forecast = record.plan.forecast(phase)
            if forecast is not None:
                self._forecast(job_name, phase, forecast)

    def plan_failed(self, job_name: str) -> None:
        """No plan could be made for a step."""
        self._plans_failed.labels(job_name).inc()

    def step_measured(self, job: Job, record: PlannedStep) -> None:
        """A member reported a step; shown once all of its kind have."""
        name = job.spec.name
        for phase in Phase:
            measured = record.measured_imbalance(phase)
            if measured is not None:
                self._measured_imbalance.labels(name, phase).set(measured)
        if len(record.ranks) == job.spec.n_ranks:
            ranks = record.ranks.values()
            self._step_seconds.labels(name).set(max(rank.step_seconds for rank in ranks))
            self._wait_seconds.labels(name).set(max(rank.wait_seconds for rank in ranks))

    def members_changed(self, members: Iterable[Member]) -> None:
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

    def ranks_changed(self, jobs: Iterable[Job]) -> None:
        """A rank came or went."""
        self._leases.labels("rank").set(sum(len(job.joined_ranks) for job in jobs))

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

    def _forecast(self, job_name: str, phase: Phase, forecast: PhaseForecast) -> None:
        moved = int(forecast.bytes_in.sum() + forecast.bytes_out.sum())
        self._home_imbalance.labels(job_name, phase).set(forecast.home_imbalance)
        self._predicted_imbalance.labels(job_name, phase).set(forecast.predicted_imbalance)
        self._moved_bytes.labels(job_name, phase).set(moved)

    def _gauge(
        self, name: str, help_text: str, labels: tuple[str, ...], *, of_job: bool = True
    ) -> Gauge:
        gauge = Gauge(f"{_PREFIX}_{name}", help_text, labels, registry=self.registry)
        return self._tracked(gauge, of_job)

    def _counter(
        self, name: str, help_text: str, labels: tuple[str, ...], *, of_job: bool = True
    ) -> Counter:
        counter = Counter(f"{_PREFIX}_{name}", help_text, labels, registry=self.registry)
        return self._tracked(counter, of_job)

    def _tracked(self, metric: Metric, of_job: bool) -> Metric:
        if of_job:
            self._job_series.append(metric)
        return metric
