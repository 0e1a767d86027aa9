"""Prometheus metrics of one trainer rank.

Every series carries the job's name and the rank, one value each in a process; servers have labels
for as long as the rank is connected to them. Series are looked up once, so that a tick costs a few
additions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase

from core_attention.ca_task import Phase

_PREFIX = "distca_trainer"
_TICK_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_STEP_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
_PLAN_SECONDS_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)
_RECOVERY_SECONDS_BUCKETS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)

OWN_PROCESS = "none"
"""Label ``transport`` of rows that do not travel: those of the rank's own in-place server."""

REPLAYED_ON = ("server", "home")
"""Where a lost server's ticks run again."""
AUDIT_RESULTS = ("equal", "different")
"""What recomputing a task at home showed."""
CORRUPTIONS = ("checksum", "not_finite", "audit")
"""What showed that a result is wrong."""


@dataclass(frozen=True, kw_only=True)
class ServedTasks:
    """What one server ran for this rank in one step and phase.

    Attributes:
        server_id: the server.
        transport: by which it was reached; :data:`OWN_PROCESS` for the rank's own.
        phase: forward or backward.
        tasks: CA-tasks with their queries at home on this rank.
        q_rows, kv_rows: rows that the server was given.
    """

    server_id: str
    transport: str
    phase: Phase
    tasks: int
    q_rows: int
    kv_rows: int


@dataclass(frozen=True, eq=False)
class _Exposure:
    """How much of its ticks a rank was blocked on; only of one that computes on its own thread."""

    seconds: Histogram
    hidden: Counter
    exposed: Counter


@dataclass(frozen=True, eq=False)
class _PhaseSeries:
    """The series of one phase, kept so that a tick costs no lookup by label."""

    seconds: Histogram
    exposure: _Exposure | None


class TrainerMetrics:
    """What one rank has run and waited for. Thread-safe.

    Args:
        registry: of the session.
        job_name, rank: values of the labels of every series.
        runs_ahead: the rank's thread runs ahead of a device. It is blocked while that computes, so
            what is exposed of core attention is not known, and the series of it are left out.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        job_name: str,
        rank: int,
        *,
        runs_ahead: bool = False,
    ) -> None:
        self._registry = registry
        self._runs_ahead = runs_ahead
        self._identity = (job_name, str(rank))
        self._by_server: list[MetricWrapperBase] = []
        self._make_step_series()
        self._make_tick_series()
        self._make_server_series()
        self._make_failure_series()

    def tick_collected(
        self, phase: Phase, *, flight_seconds: float, exposed_seconds: float
    ) -> None:
        """A tick's last reply has been taken in.

        Args:
            phase: forward or backward.
            flight_seconds: from its requests' sending to the arrival of its last reply.
            exposed_seconds: how long of that the rank was blocked.
        """
        series = self._phases[phase]
        series.seconds.observe(flight_seconds)
        if series.exposure is not None:
            series.exposure.seconds.observe(exposed_seconds)
            series.exposure.exposed.inc(exposed_seconds)
            series.exposure.hidden.inc(max(flight_seconds - exposed_seconds, 0.0))

    def plan_waited_for(self, seconds: float) -> None:
        """A step's plan is here, ``seconds`` after it was wanted."""
        self._plan_wait_seconds.observe(seconds)
        self._part_seconds["plan"].inc(seconds)

    def step_ended(
        self,
        *,
        complete: bool,
        tokens: int,
        seconds: float,
        send_seconds: float,
        wait_seconds: float,
    ) -> None:
        """A step is over.

        Args:
            complete: it ran to its end.
            tokens: of this rank.
            seconds: wall seconds from its plan's arrival.
            send_seconds: of these, spent packing and handing over requests.
            wait_seconds: of these, blocked on results of core attention.
        """
        self._steps["complete" if complete else "given_up"].inc()
        if complete:
            self._tokens.inc(tokens)
            self._step_tokens.set(tokens)
            self._step_seconds.observe(seconds)
            self._part_seconds["send"].inc(send_seconds)
            if self._runs_ahead:
                wait_seconds = 0.0
            else:
                self._part_seconds["wait"].inc(wait_seconds)
            self._part_seconds["compute"].inc(max(seconds - send_seconds - wait_seconds, 0.0))

    def tasks_served(self, served: Iterable[ServedTasks]) -> None:
        """A step ran to its end, and these servers ran its tasks."""
        for one in served:
            labels = (*self._identity, one.server_id, one.transport, one.phase)
            self._tasks.labels(*labels).inc(one.tasks)
            self._rows.labels(*labels, "q").inc(one.q_rows)
            self._rows.labels(*labels, "kv").inc(one.kv_rows)

    def server_left(self, server_id: str) -> None:
        """The rank is no longer connected to a server: its series go."""
        for metric in self._by_server:
            metric.remove_by_labels({"server": server_id})

    def tick_replayed(self, phase: Phase, where: str) -> None:
        """A lost server's tick ran again, on another ``"server"`` or at ``"home"``."""
        self._replayed[phase, where].inc()

    def recovered(self, seconds: float) -> None:
        """A failure is over, ``seconds`` after it was noticed: its ticks have been replayed."""
        self._recovery_seconds.observe(seconds)

    def stale_result(self) -> None:
        """A late result of an earlier epoch was dropped."""
        self._stale_results.inc()

    def task_audited(self, result: str) -> None:
        """A task was recomputed at home, with one of :data:`AUDIT_RESULTS`."""
        self._audited[result].inc()

    def corrupt_result(self, kind: str) -> None:
        """A server's result is wrong, as one of :data:`CORRUPTIONS` showed."""
        self._corrupt[kind].inc()

    def _make_step_series(self) -> None:
        steps = self._counter("steps_total", "Steps ended, by how.", "outcome")
        self._steps = {
            outcome: steps.labels(*self._identity, outcome) for outcome in ("complete", "given_up")
        }
        self._tokens = self._counter("tokens_total", "Tokens of complete steps.").labels(
            *self._identity
        )
        self._step_tokens = Gauge(
            f"{_PREFIX}_step_tokens",
            "Tokens of the last complete step.",
            ("job_name", "rank"),
            registry=self._registry,
        ).labels(*self._identity)
        self._step_seconds = self._histogram(
            "step_seconds",
            "Wall seconds of a complete step, from its plan's arrival.",
            _STEP_SECONDS_BUCKETS,
        ).labels(*self._identity)
        parts = self._counter(
            "step_part_seconds_total",
            "Where the time of complete steps went: compute, packing and sending requests, blocked "
            "on results of core attention (with a GPU: in compute), waiting for the plan.",
            "part",
        )
        self._part_seconds = {
            part: parts.labels(*self._identity, part)
            for part in ("compute", "send", "wait", "plan")
            if not (self._runs_ahead and part == "wait")
        }
        self._plan_wait_seconds = self._histogram(
            "plan_wait_seconds",
            "Seconds that a step waited for its plan; the first step always waits.",
            _PLAN_SECONDS_BUCKETS,
        ).labels(*self._identity)

    def _make_tick_series(self) -> None:
        seconds = self._histogram(
            "tick_seconds",
            "Seconds of a tick, from its requests' sending to the arrival of its last reply.",
            _TICK_SECONDS_BUCKETS,
            "phase",
        )
        exposures = {} if self._runs_ahead else self._make_exposure_series()
        self._phases = {
            phase: _PhaseSeries(
                seconds=seconds.labels(*self._identity, phase), exposure=exposures.get(phase)
            )
            for phase in Phase
        }

    def _make_exposure_series(self) -> dict[Phase, _Exposure]:
        exposed = self._histogram(
            "tick_exposed_seconds",
            "Seconds of a tick in which the rank was blocked, waiting for its last reply; of ranks "
            "without a GPU.",
            _TICK_SECONDS_BUCKETS,
            "phase",
        )
        communication = self._counter(
            "communication_seconds_total",
            "Seconds of ticks: hidden behind other work of the rank, or exposed; of ranks without "
            "a GPU.",
            "phase",
            "visibility",
        )
        return {
            phase: _Exposure(
                seconds=exposed.labels(*self._identity, phase),
                hidden=communication.labels(*self._identity, phase, "hidden"),
                exposed=communication.labels(*self._identity, phase, "exposed"),
            )
            for phase in Phase
        }

    def _make_server_series(self) -> None:
        self._tasks = self._counter(
            "tasks_total",
            "CA-tasks of this rank's queries that a server ran in complete steps.",
            "server",
            "transport",
            "phase",
        )
        self._rows = self._counter(
            "rows_total",
            "Rows that a server was given by this rank in complete steps.",
            "server",
            "transport",
            "phase",
            "kind",
        )
        self._by_server += [self._tasks, self._rows]

    def _make_failure_series(self) -> None:
        replayed = self._counter(
            "replayed_ticks_total",
            "Ticks run again because their server was lost, by where.",
            "phase",
            "where",
        )
        self._replayed = {
            (phase, where): replayed.labels(*self._identity, phase, where)
            for phase in Phase
            for where in REPLAYED_ON
        }
        self._recovery_seconds = self._histogram(
            "recovery_seconds",
            "Seconds from noticing that a server is lost to the end of the replay.",
            _RECOVERY_SECONDS_BUCKETS,
        ).labels(*self._identity)
        self._stale_results = self._counter(
            "stale_results_total", "Late results of an earlier epoch that were dropped."
        ).labels(*self._identity)
        audited = self._counter(
            "audited_tasks_total", "CA-tasks recomputed at home, by what that showed.", "result"
        )
        self._audited = {
            result: audited.labels(*self._identity, result) for result in AUDIT_RESULTS
        }
        corrupt = self._counter(
            "corrupt_results_total", "Wrong results of servers, by what showed it.", "kind"
        )
        self._corrupt = {kind: corrupt.labels(*self._identity, kind) for kind in CORRUPTIONS}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(
            f"{_PREFIX}_{name}", text, ("job_name", "rank", *labels), registry=self._registry
        )

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(
            f"{_PREFIX}_{name}",
            text,
            ("job_name", "rank", *labels),
            buckets=buckets,
            registry=self._registry,
        )
