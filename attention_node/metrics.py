"""Prometheus metrics of an attention server, in a process of its own or in a trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from attention_node.executor import Executor, KernelCall
from attention_node.hello import HelloRefusal
from attention_node.served_job import ExchangeTimes
from core_attention.ca_task import Phase

_PREFIX = "distca_attention_node"
_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
_TASKS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)

STALE_REASONS = ("epoch", "job", "size", "checksum")
"""Why a message is refused: of an earlier epoch, of a job that is not served, of a wrong length,
damaged on the way."""


@dataclass(frozen=True, eq=False)
class _PhaseSeries:
    """The series of one phase, kept so that a kernel call costs no lookup by label."""

    call_seconds: Histogram
    call_tasks: Histogram
    tasks: Counter
    query_rows: Counter
    qk_pairs: Counter
    wait: Histogram
    transport: Histogram
    kernel: Histogram


class NodeMetrics:
    """What one server has run. Thread-safe.

    Args:
        registry: of the process.
        server_id: the server, the value of every series' label ``server``.
    """

    def __init__(self, registry: CollectorRegistry, server_id: str) -> None:
        self._registry = registry
        self._server_id = server_id
        call_seconds = self._histogram(
            "kernel_call_seconds", "Seconds of one fused kernel call.", ("phase",)
        )
        call_tasks = self._histogram(
            "kernel_call_tasks",
            "CA-tasks fused into one kernel call.",
            ("phase",),
            buckets=_TASKS_BUCKETS,
        )
        tasks = self._counter("tasks_total", "CA-tasks run.", ("phase",))
        query_rows = self._counter("query_rows_total", "Query rows of CA-tasks run.", ("phase",))
        qk_pairs = self._counter("qk_pairs_total", "Query-key pairs computed.", ("phase",))
        tick_seconds = self._histogram(
            "tick_seconds",
            "Seconds of one rank's part of a tick: waiting for other ranks' rows and for the "
            "device, in kernel calls, and in transport both ways.",
            ("phase", "part"),
        )
        self._phases = {
            phase: _PhaseSeries(
                call_seconds=call_seconds.labels(server_id, phase),
                call_tasks=call_tasks.labels(server_id, phase),
                tasks=tasks.labels(server_id, phase),
                query_rows=query_rows.labels(server_id, phase),
                qk_pairs=qk_pairs.labels(server_id, phase),
                wait=tick_seconds.labels(server_id, phase, "wait"),
                transport=tick_seconds.labels(server_id, phase, "transport"),
                kernel=tick_seconds.labels(server_id, phase, "kernel"),
            )
            for phase in Phase
        }
        self._steps = self._counter(
            "steps_total", "Steps of which every tick on this server is over."
        ).labels(server_id)
        self._memory_wait_seconds = self._counter(
            "memory_wait_seconds_total",
            "Seconds, summed over ranks' lanes, in which a message waited at its sender because "
            "memory for it was missing.",
        ).labels(server_id)
        stale = self._counter(
            "stale_messages_total", "Messages of ticks that were refused, by reason.", ("reason",)
        )
        refused = self._counter(
            "sessions_refused_total",
            "Connections of ranks that were refused, by reason.",
            ("reason",),
        )
        self._refused = {reason: refused.labels(server_id, reason) for reason in HelloRefusal}
        self._stale = {reason: stale.labels(server_id, reason) for reason in STALE_REASONS}

    def kernel_called(self, call: KernelCall) -> None:
        """Counts one kernel call."""
        series = self._phases[call.phase]
        series.call_seconds.observe(call.seconds)
        series.call_tasks.observe(call.tasks)
        series.tasks.inc(call.tasks)
        series.query_rows.inc(call.query_rows)
        series.qk_pairs.inc(call.qk_pairs)

    def exchange_ended(self, times: ExchangeTimes) -> None:
        """Counts one rank's part of a tick."""
        series = self._phases[times.tick.phase]
        series.wait.observe(times.wait_seconds)
        series.kernel.observe(times.kernel_seconds)
        if times.transport_seconds is not None:
            series.transport.observe(times.transport_seconds)

    def step_finished(self) -> None:
        """Counts one finished step."""
        self._steps.inc()

    def stale_message(self, reason: str) -> None:
        """Counts a message that was refused, for one of :data:`STALE_REASONS`."""
        self._stale[reason].inc()

    def memory_waited_for(self, seconds: float) -> None:
        """Counts the time that a rank's lane waited for memory."""
        self._memory_wait_seconds.inc(seconds)

    def session_refused(self, reason: HelloRefusal) -> None:
        """Counts a rank whose hello was refused."""
        self._refused[reason].inc()

    def watch(self, executor: Executor, open_ticks: Callable[[], int]) -> None:
        """Exports the server's queues and its busy and idle time, read at each scrape."""
        self._registry.register(_WatchedCollector(self._server_id, executor, open_ticks))

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, ("server", *labels), registry=self._registry)

    def _histogram(
        self,
        name: str,
        text: str,
        labels: tuple[str, ...],
        buckets: tuple[float, ...] = _SECONDS_BUCKETS,
    ) -> Histogram:
        return Histogram(
            f"{_PREFIX}_{name}",
            text,
            ("server", *labels),
            buckets=buckets,
            registry=self._registry,
        )


class _WatchedCollector(Collector):
    """Reads an executor and a tick server when scraped."""

    def __init__(self, server_id: str, executor: Executor, open_ticks: Callable[[], int]) -> None:
        self._server_id = server_id
        self._executor = executor
        self._open_ticks = open_ticks

    def collect(self) -> Iterable[Metric]:
        executor = self._executor
        gauges: tuple[tuple[str, str, float], ...] = (
            (
                "queue_depth",
                "Groups of CA-tasks that wait for the device now, and messages that came during a "
                "call and may make more of them ready.",
                executor.queued_parts,
            ),
            ("open_ticks", "Ticks of which some messages have arrived.", self._open_ticks()),
        )
        counters = (
            (
                "queue_seconds_total",
                "Seconds that groups of CA-tasks have waited for the device, summed over them; "
                "its rate is the mean queue depth.",
                executor.queued_part_seconds,
            ),
            ("busy_seconds_total", "Seconds in kernel calls.", executor.busy_seconds),
            ("idle_seconds_total", "Seconds without a kernel call.", executor.idle_seconds),
        )
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=("server",))
            gauge.add_metric((self._server_id,), value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"{_PREFIX}_{name}", text, labels=("server",))
            counter.add_metric((self._server_id,), value)
            yield counter
