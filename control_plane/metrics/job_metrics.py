"""The metrics of each open job. A job's series go when it is closed."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from control_plane.jobs.job import Job
from control_plane.jobs.job_spec import JobSpec
from control_plane.jobs.publication import Publication
from control_plane.jobs.step import ReadyStep, StepRecord
from control_plane.metrics.server_metrics import PREFIX
from core_attention.ca_task import Phase
from core_attention.plan import AT_HOME, Plan, PlanVerdict
from distca.metric_table import Label, Table, counter, gauge, histogram

_JOB = Label("job_name")
_PHASE = Label("phase", tuple(Phase))
_ABOVE = tuple(verdict for verdict in PlanVerdict if verdict is not PlanVerdict.KEPT)
_WITHOUT = ("round", "late")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class JobTable(Table):
    """Plans and measured steps of the open jobs."""

    prefix = PREFIX

    home_imbalance_ratio = gauge(
        "Max over mean busy seconds of the ranks if nothing moved, in the last planned step; of "
        "pipelines, slots over their levels.",
        _JOB,
        _PHASE,
    )
    predicted_imbalance_ratio = gauge(
        "Max over mean busy seconds of the servers that the last plan predicts.", _JOB, _PHASE
    )
    measured_imbalance_ratio = gauge(
        "Max over mean busy seconds of the servers, in the last step that all have reported.",
        _JOB,
        _PHASE,
    )
    saved_seconds = gauge(
        "By how much the busiest server would have been busier if nothing had moved, in the last "
        "step that all have reported.",
        _JOB,
        _PHASE,
    )
    predicted_over_measured_ratio = gauge(
        "Predicted over measured busy seconds of all servers, in the last step that all have "
        "reported.",
        _JOB,
        _PHASE,
    )
    predicted_moved_bytes = gauge(
        "Bytes that the last plan moves between processes in one layer, both ways.", _JOB, _PHASE
    )
    tolerance_ratio = gauge(
        "By how much the busiest server may exceed the mean (eps in force).", _JOB
    )
    job_info = gauge(
        "1 for each open job.", _JOB, Label("placement", ("pool", "in_place", "mixed"))
    )
    step_finished_timestamp_seconds = gauge(
        "Unix time at which the last step was reported by all ranks, or the job was opened.", _JOB
    )
    plan_bytes = gauge("Bytes of all slices of the last plan.", _JOB)
    epoch = gauge("Highest epoch of the job's plans; 0 until a replan.", _JOB)
    job_ranks = gauge(
        "Ranks of the job, joined or expected.", _JOB, Label("state", ("joined", "expected"))
    )
    step_seconds = gauge(
        "Wall seconds of the slowest rank, in the last step that all have reported.", _JOB
    )
    wait_seconds = gauge(
        "Seconds in which the rank that waited longest had nothing to compute but what waits for "
        "core attention, in the last step that all have reported.",
        _JOB,
    )
    step_tokens = gauge(
        "Tokens of the last step that all ranks have reported; those that several ranks of a "
        "pipeline or tensor-parallel group hold count once.",
        _JOB,
    )
    pending_steps = gauge(
        "Steps of which some ranks' manifests are here and others' are not.", _JOB
    )
    planning_backlog = gauge("Steps whose manifests are all here and whose plan is not made.", _JOB)
    steps_planned_total = counter("Plans made.", _JOB)
    steps_without_ranks_total = counter(
        "Steps planned without some ranks that had not left: none of them was to come (round), or "
        "one came late or sat in a collective (late).",
        _JOB,
        Label("why", _WITHOUT),
    )
    plans_above_tolerance_total = counter(
        "Plans whose busiest server is more than 0.02 above the tolerance, by what is known of it.",
        _JOB,
        Label("verdict", _ABOVE),
    )
    plans_at_home_total = counter(
        "Plans that leave documents at home, since the planner was being compiled or late.", _JOB
    )
    plans_failed_total = counter("Steps for which no plan could be made.", _JOB)
    replans_total = counter("Steps planned again with a higher epoch.", _JOB)
    steps_finished_total = counter("Steps that all ranks have reported.", _JOB)
    tokens_total = counter("Tokens of the steps finished.", _JOB)
    plan_seconds = histogram(
        "Wall seconds to merge a step's manifests and plan it.", buckets=_SECONDS
    )
    publish_seconds = histogram(
        "Wall seconds from a step's last manifest to its plan's publication, with queueing.",
        buckets=_SECONDS,
    )


class JobMetrics:
    """Plans and measured steps of the open jobs. A job's series begin with :meth:`opened`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series = JobTable(registry)
        self._ready_at: dict[str, dict[int, float]] = {}
        self._lost_in: dict[str, dict[str, int]] = {}

    def opened(self, spec: JobSpec) -> None:
        """A job was created."""
        self._ready_at[spec.name] = {}
        series = self._series.at(job_name=spec.name)
        series.tolerance_ratio.set(spec.options.tolerance)
        series.job_info.labels(spec.name, spec.placement.name.lower()).set(1)
        series.step_finished_timestamp_seconds.set_to_current_time()
        series.job_ranks.labels(spec.name, "expected").set(spec.n_ranks)
        for verdict in _ABOVE:
            series.plans_above_tolerance_total.labels(spec.name, verdict).inc(0)
        for why in _WITHOUT:
            series.steps_without_ranks_total.labels(spec.name, why).inc(0)
        for grows in (
            series.steps_planned_total,
            series.plans_at_home_total,
            series.plans_failed_total,
            series.replans_total,
            series.steps_finished_total,
            series.tokens_total,
        ):
            grows.inc(0)
        for gauge_from_start in (series.epoch, series.pending_steps, series.planning_backlog):
            gauge_from_start.set(0)

    def closed(self, name: str) -> None:
        """A job was closed; its series go."""
        self._ready_at.pop(name, None)
        self._lost_in.pop(name, None)
        self._series.forget(job_name=name)

    def ranks_changed(self, jobs: Iterable[Job]) -> None:
        """A rank came or went."""
        for job in jobs:
            self._series.job_ranks.labels(job.spec.name, "joined").set(len(job.leases.joined))

    def manifest_received(self, job: Job) -> None:
        """A rank handed in a manifest."""
        self._series.pending_steps.labels(job.spec.name).set(job.n_pending_steps)

    def step_ready(self, job: Job, step: int) -> None:
        """The last manifest of a step is here."""
        self._ready_at[job.spec.name][step] = time.perf_counter()
        self._count_waiting(job)

    def step_joined(self, job: Job, ready: ReadyStep) -> None:
        """Ranks have joined a step without a number, perhaps not all that could."""
        if ready.without:
            self._series.steps_without_ranks_total.labels(job.spec.name, ready.without).inc()

    def step_planned(self, job: Job, publication: Publication) -> None:
        """A plan was made and published."""
        record, name = publication.record, job.spec.name
        self._series.steps_planned_total.labels(name).inc()
        if record.plan.planner == AT_HOME:
            self._series.plans_at_home_total.labels(name).inc()
        verdict = record.plan.verdict
        if verdict in _ABOVE:
            self._series.plans_above_tolerance_total.labels(name, verdict).inc()
        self._series.plan_seconds.observe(record.plan_seconds)
        self._series.plan_bytes.labels(name).set(publication.plan_bytes)
        ready_at = self._ready_at[name].pop(record.step, None)
        if ready_at is not None:
            self._series.publish_seconds.observe(time.perf_counter() - ready_at)
        self._count_waiting(job)
        for phase in record.phases:
            self._forecast(name, phase, record.plan)

    def note_loss(self, job: Job, server_id: str) -> bool:
        """Notes that ``job`` has lost ``server_id``; returns whether that is new in its epoch."""
        lost_in = self._lost_in.setdefault(job.spec.name, {})
        is_new = lost_in.get(server_id) != job.epoch
        lost_in[server_id] = job.epoch
        return is_new

    def plan_failed(self, job: Job, step: int) -> None:
        """No plan could be made for a step."""
        self._series.plans_failed_total.labels(job.spec.name).inc()
        self._ready_at[job.spec.name].pop(step, None)
        self._count_waiting(job)

    def step_replanned(self, job: Job, epoch: int) -> None:
        """A step was planned again, under ``epoch``."""
        self._series.replans_total.labels(job.spec.name).inc()
        self._series.epoch.labels(job.spec.name).set(epoch)

    def rank_reported(self, job: Job, record: StepRecord) -> None:
        """A rank reported a step for the first time; shown once all have."""
        if len(record.ranks) == (len(record.sequences) or job.spec.n_ranks):
            name, ranks = job.spec.name, record.ranks.values()
            tokens = job.tokens_of(record)
            self._series.step_seconds.labels(name).set(max(rank.step_seconds for rank in ranks))
            if record.longest_wait_seconds is not None:
                self._series.wait_seconds.labels(name).set(record.longest_wait_seconds)
            self._series.step_tokens.labels(name).set(tokens)
            self._series.tokens_total.labels(name).inc(tokens)
            self._series.steps_finished_total.labels(name).inc()
            self._series.step_finished_timestamp_seconds.labels(name).set_to_current_time()

    def server_reported(self, job: Job, record: StepRecord) -> None:
        """A server reported a step for the first time; shown once all that have a task have."""
        for phase in record.phases:
            imbalance, plan = record.measured_imbalance(phase), record.plan
            if imbalance is None:
                continue
            series = self._series.at(job_name=job.spec.name, phase=phase)
            series.measured_imbalance_ratio.set(imbalance)
            busy = record.mean_busy_seconds(phase)
            series.saved_seconds.set(((plan.home_imbalance(phase) or imbalance) - imbalance) * busy)
            if (forecast := plan.forecast(phase)) is not None and busy > 0:
                predicted = float(forecast.seconds.sum()) * job.spec.n_layers / len(plan.servers)
                series.predicted_over_measured_ratio.set(predicted / busy)

    def _forecast(self, name: str, phase: Phase, plan: Plan) -> None:
        forecast = plan.forecast(phase)
        at_home, planned = plan.home_imbalance(phase), plan.predicted_imbalance(phase)
        if forecast is None or at_home is None or planned is None:
            return
        series = self._series.at(job_name=name, phase=phase)
        series.home_imbalance_ratio.set(at_home)
        series.predicted_imbalance_ratio.set(planned)
        series.predicted_moved_bytes.set(int(forecast.bytes_in.sum() + forecast.bytes_out.sum()))

    def _count_waiting(self, job: Job) -> None:
        self._series.pending_steps.labels(job.spec.name).set(job.n_pending_steps)
        self._series.planning_backlog.labels(job.spec.name).set(len(self._ready_at[job.spec.name]))
