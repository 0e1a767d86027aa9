"""What Prometheus can read about each open job. A job's series go when it is closed."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Histogram

from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.publication import Publication
from control_plane.jobs.step import PlannedStep
from control_plane.metrics.metric_set import PREFIX, MetricSet
from core_attention.ca_task import Phase
from core_attention.plan import PhaseForecast

_SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class JobMetrics:
    """Plans and measured steps of the open jobs. A job's series begin with :meth:`opened`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series = series = MetricSet(registry, "job_name")
        self._ready_at: dict[str, dict[int, float]] = {}
        self._home_imbalance = series.gauge(
            "home_imbalance_ratio",
            "Max over mean busy seconds of the ranks if nothing moved, in the last planned step.",
            "phase",
        )
        self._predicted_imbalance = series.gauge(
            "predicted_imbalance_ratio",
            "Max over mean busy seconds of the servers that the last plan predicts.",
            "phase",
        )
        self._measured_imbalance = series.gauge(
            "measured_imbalance_ratio",
            "Max over mean busy seconds of the servers, in the last step that all have reported.",
            "phase",
        )
        self._prediction = series.gauge(
            "predicted_over_measured_ratio",
            "Predicted over measured busy seconds of all servers, in the last step that all have "
            "reported.",
            "phase",
        )
        self._moved_bytes = series.gauge(
            "predicted_moved_bytes",
            "Bytes that the last plan moves between processes in one layer, both ways.",
            "phase",
        )
        self._tolerance = series.gauge(
            "tolerance_ratio", "By how much the busiest server may exceed the mean (eps in force)."
        )
        self._plan_bytes = series.gauge("plan_bytes", "Bytes of all slices of the last plan.")
        self._epoch = series.gauge("epoch", "Highest epoch of the job's plans; 0 until a replan.")
        self._ranks = series.gauge("job_ranks", "Ranks of the job, joined or expected.", "state")
        self._step_seconds = series.gauge(
            "step_seconds",
            "Wall seconds of the slowest rank, in the last step that all have reported.",
        )
        self._wait_seconds = series.gauge(
            "wait_seconds",
            "Seconds that the rank which waited longest was blocked on core attention, in the last "
            "step that all have reported; of ranks without a GPU.",
        )
        self._step_tokens = series.gauge(
            "step_tokens", "Tokens of all ranks in the last step that all have reported."
        )
        self._pending = series.gauge(
            "pending_steps", "Steps of which some ranks' manifests are here and others' are not."
        )
        self._backlog = series.gauge(
            "planning_backlog", "Steps whose manifests are all here and whose plan is not made."
        )
        self._manifests = series.counter("manifests_total", "Manifests that ranks have handed in.")
        self._steps_planned = series.counter("steps_planned_total", "Plans made.")
        self._plans_failed = series.counter(
            "plans_failed_total", "Steps for which no plan could be made."
        )
        self._replans = series.counter("replans_total", "Steps planned again with a higher epoch.")
        self._steps_finished = series.counter(
            "steps_finished_total", "Steps that all ranks have reported."
        )
        self._tokens = series.counter("tokens_total", "Tokens of the steps finished.")
        self._plan_seconds = Histogram(
            f"{PREFIX}_plan_seconds",
            "Wall seconds to merge a step's manifests and plan it.",
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )
        self._publish_seconds = Histogram(
            f"{PREFIX}_publish_seconds",
            "Wall seconds from a step's last manifest to its plan's publication, with queueing.",
            registry=registry,
            buckets=_SECONDS_BUCKETS,
        )

    def opened(self, spec: JobSpec) -> None:
        """A job was created."""
        self._ready_at[spec.name] = {}
        self._tolerance.labels(spec.name).set(spec.options.tolerance)
        self._ranks.labels(spec.name, "expected").set(spec.n_ranks)
        for counter in (
            self._manifests,
            self._steps_planned,
            self._plans_failed,
            self._replans,
            self._steps_finished,
            self._tokens,
        ):
            counter.labels(spec.name)
        for gauge in (self._epoch, self._pending, self._backlog):
            gauge.labels(spec.name).set(0)

    def closed(self, name: str) -> None:
        """A job was closed; its series go."""
        self._ready_at.pop(name, None)
        self._series.forget(name)

    def ranks_changed(self, jobs: Iterable[Job]) -> None:
        """A rank came or went."""
        for job in jobs:
            self._ranks.labels(job.spec.name, "joined").set(len(job.joined_ranks))

    def manifest_received(self, job: Job) -> None:
        """A rank handed in a manifest."""
        self._manifests.labels(job.spec.name).inc()
        self._pending.labels(job.spec.name).set(job.n_pending_steps)

    def step_ready(self, job: Job, step: int) -> None:
        """The last manifest of a step is here."""
        self._ready_at[job.spec.name][step] = time.perf_counter()
        self._count_waiting(job)

    def step_planned(self, job: Job, publication: Publication) -> None:
        """A plan was made and published."""
        record, name = publication.record, job.spec.name
        self._steps_planned.labels(name).inc()
        self._plan_seconds.observe(record.plan_seconds)
        self._plan_bytes.labels(name).set(publication.plan_bytes)
        ready_at = self._ready_at[name].pop(record.step, None)
        if ready_at is not None:
            self._publish_seconds.observe(time.perf_counter() - ready_at)
        self._count_waiting(job)
        for phase in record.phases:
            forecast = record.plan.forecast(phase)
            if forecast is not None:
                self._forecast(name, phase, forecast)

    def plan_failed(self, job: Job, step: int) -> None:
        """No plan could be made for a step."""
        self._plans_failed.labels(job.spec.name).inc()
        self._ready_at[job.spec.name].pop(step, None)
        self._count_waiting(job)

    def step_replanned(self, job: Job, epoch: int) -> None:
        """A step was planned again, under ``epoch``."""
        self._replans.labels(job.spec.name).inc()
        self._epoch.labels(job.spec.name).set(epoch)

    def rank_reported(self, job: Job, record: PlannedStep) -> None:
        """A rank reported a step for the first time; shown once all have."""
        if len(record.ranks) == job.spec.n_ranks:
            name, ranks = job.spec.name, record.ranks.values()
            tokens = sum(rank.tokens for rank in ranks)
            self._step_seconds.labels(name).set(max(rank.step_seconds for rank in ranks))
            if record.longest_wait_seconds is not None:
                self._wait_seconds.labels(name).set(record.longest_wait_seconds)
            self._step_tokens.labels(name).set(tokens)
            self._tokens.labels(name).inc(tokens)
            self._steps_finished.labels(name).inc()

    def server_reported(self, job: Job, record: PlannedStep) -> None:
        """A server reported a step for the first time; shown once all that have a task have."""
        for phase in record.phases:
            imbalance = record.measured_imbalance(phase)
            if imbalance is not None:
                self._measured_imbalance.labels(job.spec.name, phase).set(imbalance)
                self._predicted_over_measured(job, record, phase)

    def _predicted_over_measured(self, job: Job, record: PlannedStep, phase: Phase) -> None:
        forecast = record.plan.forecast(phase)
        measured = sum(sum(server.busy_seconds(phase)) for server in record.servers.values())
        if forecast is not None and measured > 0:
            predicted = float(forecast.seconds.sum()) * job.spec.n_layers
            self._prediction.labels(job.spec.name, phase).set(predicted / measured)

    def _forecast(self, name: str, phase: Phase, forecast: PhaseForecast) -> None:
        moved = int(forecast.bytes_in.sum() + forecast.bytes_out.sum())
        self._home_imbalance.labels(name, phase).set(forecast.home_imbalance)
        self._predicted_imbalance.labels(name, phase).set(forecast.predicted_imbalance)
        self._moved_bytes.labels(name, phase).set(moved)

    def _count_waiting(self, job: Job) -> None:
        self._pending.labels(job.spec.name).set(job.n_pending_steps)
        self._backlog.labels(job.spec.name).set(len(self._ready_at[job.spec.name]))
