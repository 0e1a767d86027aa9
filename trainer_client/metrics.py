"""Prometheus metrics of one trainer rank.

Every series carries the job's name and the rank, one value each in a process. What servers ran for
the rank is counted in sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from core_attention.ca_task import Phase
from distca.metric_table import Label, Table, counter, gauge, histogram

OWN_PROCESS = "none"
"""Label ``transport`` of rows that do not travel: those of the rank's own in-place server."""

REPLAYED_ON = ("server", "home")
"""The places where a lost server's ticks run again."""
AUDIT_RESULTS = ("equal", "different")
"""Outcomes of recomputing a task at home."""
CORRUPTIONS = ("checksum", "not_finite", "audit")
"""Checks that show that a result is wrong."""


@dataclass(frozen=True, kw_only=True)
class ServedTasks:
    """Tasks that one server ran for this rank in one step and phase.

    Attributes:
        transport: by which it was reached; :data:`OWN_PROCESS` for the rank's own.
        phase: forward or backward.
        tasks: CA-tasks with their queries at home on this rank.
        q_rows, kv_rows: rows that the server was given.
    """

    transport: str
    phase: Phase
    tasks: int
    q_rows: int
    kv_rows: int


@dataclass(frozen=True)
class TickWait:
    """One complete tick, and how long it held up the rank.

    Attributes:
        phase: forward or backward.
        flight_seconds: from the rows' going to the arrival of the last reply.
        exposed_seconds: how long of that nothing else was computed.
    """

    phase: Phase
    flight_seconds: float
    exposed_seconds: float


_PREFIX = "distca_trainer"
_RANK = (Label("job_name"), Label("rank"))
_PHASE = Label("phase", tuple(Phase))
_TRANSPORT = Label("transport")
_ROWS = Label("kind", ("q", "kv"))


class TrainerTable(Table):
    """The metrics of what a rank has run and waited for."""

    prefix = _PREFIX

    steps_total = counter(
        "Steps ended, by how.", *_RANK, Label("outcome", ("complete", "given_up"))
    )
    tokens_total = counter("Tokens of complete steps.", *_RANK)
    step_tokens = gauge("Tokens of the last complete step.", *_RANK)
    step_seconds = histogram(
        "Wall seconds of a complete step, from its plan's arrival.",
        *_RANK,
        buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
    )
    step_part_seconds_total = counter(
        "Where the time of complete steps went: compute, packing and sending requests, nothing "
        "to compute but what waits for core attention, waiting for the plan.",
        *_RANK,
        Label("part", ("compute", "send", "wait", "plan")),
    )
    plan_wait_seconds = histogram(
        "Seconds that a step waited for its plan; the first step always waits.",
        *_RANK,
        buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0),
    )
    tick_seconds = histogram(
        "Seconds of a tick, from its requests' sending to the arrival of its last reply.",
        *_RANK,
        _PHASE,
    )
    tick_exposed_seconds = histogram(
        "Seconds of a tick in which the rank had nothing else to compute.", *_RANK, _PHASE
    )
    communication_seconds_total = counter(
        "Seconds of ticks: hidden behind other work of the rank, or exposed.",
        *_RANK,
        _PHASE,
        Label("visibility", ("hidden", "exposed")),
    )
    tasks_total = counter(
        "CA-tasks of this rank's queries that servers ran in complete steps.",
        *_RANK,
        _TRANSPORT,
        _PHASE,
    )
    rows_total = counter(
        "Rows that servers were given by this rank in complete steps.",
        *_RANK,
        _TRANSPORT,
        _PHASE,
        _ROWS,
    )
    replayed_ticks_total = counter(
        "Ticks run again because their server was lost, by where.",
        *_RANK,
        _PHASE,
        Label("where", REPLAYED_ON),
    )
    recovery_seconds = histogram(
        "Seconds from noticing that a server is lost to the end of the replay.",
        *_RANK,
        buckets=(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0),
    )
    steps_at_home_total = counter(
        "Steps of which the rank computed core attention itself, since the control plane was away.",
        *_RANK,
    )
    stale_results_total = counter("Late results of an earlier epoch that were dropped.", *_RANK)
    audited_tasks_total = counter(
        "CA-tasks recomputed at home, by what that showed.", *_RANK, Label("result", AUDIT_RESULTS)
    )
    corrupt_results_total = counter(
        "Wrong results of servers, by what showed it.", *_RANK, Label("kind", CORRUPTIONS)
    )


class TrainerMetrics:
    """Metrics of what one rank has run and waited for. Thread-safe.

    Args:
        registry: of the session.
        job_name, rank: values of the labels of every series.

    Attributes:
        series: for what one count says.
    """

    def __init__(self, registry: CollectorRegistry, job_name: str, rank: int) -> None:
        self.series = TrainerTable(registry, job_name=job_name, rank=str(rank))

    def plan_waited_for(self, seconds: float) -> None:
        """A step's plan is here, ``seconds`` after it was wanted."""
        self.series.plan_wait_seconds.observe(seconds)
        self.series.at(part="plan").step_part_seconds_total.inc(seconds)

    def step_ended(
        self,
        *,
        complete: bool,
        tokens: int,
        seconds: float,
        send_seconds: float,
        exposed_seconds: float | None,
        waits: Iterable[TickWait],
    ) -> None:
        """A step is over.

        Args:
            complete: it ran to its end.
            tokens: of this rank.
            seconds: wall seconds from its plan's arrival.
            send_seconds: of these, spent packing and handing over requests.
            exposed_seconds: of these, those in which there was nothing to compute but what waits
                for core attention; None if that is not known.
            waits: its complete ticks.
        """
        outcome = "complete" if complete else "given_up"
        self.series.at(outcome=outcome).steps_total.inc()
        self._count(waits)
        if not complete:
            return
        self.series.tokens_total.inc(tokens)
        self.series.step_tokens.set(tokens)
        self.series.step_seconds.observe(seconds)
        waited_seconds = exposed_seconds or 0.0
        parts = {
            "send": send_seconds,
            "wait": waited_seconds,
            "compute": max(seconds - send_seconds - waited_seconds, 0.0),
        }
        for part, part_seconds in parts.items():
            self.series.at(part=part).step_part_seconds_total.inc(part_seconds)

    def _count(self, waits: Iterable[TickWait]) -> None:
        of_phase = {phase: self.series.at(phase=phase) for phase in Phase}
        for wait in waits:
            series = of_phase[wait.phase]
            series.tick_seconds.observe(wait.flight_seconds)
            series.tick_exposed_seconds.observe(wait.exposed_seconds)
            hidden_seconds = max(wait.flight_seconds - wait.exposed_seconds, 0.0)
            communication = {"hidden": hidden_seconds, "exposed": wait.exposed_seconds}
            for visibility, seconds in communication.items():
                series.at(visibility=visibility).communication_seconds_total.inc(seconds)

    def tasks_served(self, served: Iterable[ServedTasks]) -> None:
        """A step ran to its end, and these servers ran its tasks."""
        for one in served:
            series = self.series.at(transport=one.transport, phase=one.phase)
            series.tasks_total.inc(one.tasks)
            series.at(kind="q").rows_total.inc(one.q_rows)
            series.at(kind="kv").rows_total.inc(one.kv_rows)
