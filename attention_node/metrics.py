"""Prometheus metrics of an attention server, in a process of its own or in a trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry

from attention_node.executor import Executor, KernelCall
from attention_node.hello import HelloRefusal
from attention_node.served_job import ExchangeTimes
from core_attention.ca_task import Phase
from distca.metric_table import Label, Reading, ReadTable, Table, counter, gauge, histogram

STALE_REASONS = ("epoch", "job", "size", "checksum")
"""The reasons to refuse a message: of an earlier epoch, of a job that is not served, of a wrong
length, damaged on the way."""

_PREFIX = "distca_attention_node"
_PARTS = ("wait", "transport", "kernel")
_SERVER = Label("server")
_PHASE = Label("phase", tuple(Phase))


class NodeTable(Table):
    """A server's work and refusals."""

    prefix = _PREFIX

    kernel_call_seconds = histogram("Seconds of one fused kernel call.", _SERVER, _PHASE)
    kernel_call_tasks = histogram(
        "CA-tasks fused into one kernel call.",
        _SERVER,
        _PHASE,
        buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    )
    tasks_total = counter("CA-tasks run.", _SERVER, _PHASE)
    query_rows_total = counter("Query rows of CA-tasks run.", _SERVER, _PHASE)
    qk_pairs_total = counter("Query-key pairs computed.", _SERVER, _PHASE)
    tick_seconds = histogram(
        "Seconds of one rank's part of a tick: waiting for other ranks' rows and for the "
        "device, in kernel calls, and in transport both ways.",
        _SERVER,
        _PHASE,
        Label("part", _PARTS),
    )
    steps_total = counter("Steps of which every tick on this server is over.", _SERVER)
    memory_wait_seconds_total = counter(
        "Seconds, summed over ranks' lanes, in which a message waited at its sender because "
        "memory for it was missing.",
        _SERVER,
    )
    stale_messages_total = counter(
        "Messages of ticks that were refused, by reason.", _SERVER, Label("reason", STALE_REASONS)
    )
    sessions_refused_total = counter(
        "Connections of ranks that were refused, by reason.",
        _SERVER,
        Label("reason", tuple(HelloRefusal)),
    )


class LoadTable(Table):
    """A server's queues and its busy and idle time, read when scraped."""

    prefix = _PREFIX

    queue_depth = gauge(
        "Groups of CA-tasks that wait for the device now, and messages that came during a "
        "call and may make more of them ready.",
        _SERVER,
    )
    open_ticks = gauge("Ticks of which some messages have arrived.", _SERVER)
    queue_seconds_total = counter(
        "Seconds that groups of CA-tasks have waited for the device, summed over them; "
        "its rate is the mean queue depth.",
        _SERVER,
    )
    busy_seconds_total = counter("Seconds in kernel calls.", _SERVER)
    idle_seconds_total = counter("Seconds without a kernel call.", _SERVER)


class NodeMetrics:
    """Counts one server's work. Thread-safe.

    Args:
        registry: of the process.
        server_id: the server, the value of every series' label ``server``.

    Attributes:
        series: for what one count says.
    """

    def __init__(self, registry: CollectorRegistry, server_id: str) -> None:
        self._registry = registry
        self._server = (server_id,)
        self.series = series = NodeTable(registry, server=server_id)
        phases = {phase: series.at(phase=phase) for phase in Phase}
        # Looked up once, so that a kernel call and a tick cost no lookup by labels.
        self._kernel = {
            phase: (
                of.kernel_call_seconds,
                of.kernel_call_tasks,
                of.tasks_total,
                of.query_rows_total,
                of.qk_pairs_total,
            )
            for phase, of in phases.items()
        }
        self._tick = {
            phase: tuple(of.at(part=part).tick_seconds for part in _PARTS)
            for phase, of in phases.items()
        }

    def kernel_called(self, call: KernelCall) -> None:
        """Counts one kernel call."""
        seconds, fused, tasks, query_rows, qk_pairs = self._kernel[call.phase]
        seconds.observe(call.seconds)
        fused.observe(call.tasks)
        tasks.inc(call.tasks)
        query_rows.inc(call.query_rows)
        qk_pairs.inc(call.qk_pairs)

    def exchange_ended(self, times: ExchangeTimes) -> None:
        """Counts one rank's part of a tick."""
        wait, transport, kernel = self._tick[times.tick.phase]
        wait.observe(times.wait_seconds)
        kernel.observe(times.kernel_seconds)
        if times.transport_seconds is not None:
            transport.observe(times.transport_seconds)

    def watch(self, executor: Executor, open_ticks: Callable[[], int]) -> None:
        """Exports the server's queues and its busy and idle time, read at each scrape."""

        def read() -> Iterator[Reading]:
            yield LoadTable.queue_depth, self._server, executor.queued_parts
            yield LoadTable.open_ticks, self._server, open_ticks()
            yield LoadTable.queue_seconds_total, self._server, executor.queued_part_seconds
            yield LoadTable.busy_seconds_total, self._server, executor.busy_seconds
            yield LoadTable.idle_seconds_total, self._server, executor.idle_seconds

        self._registry.register(ReadTable(LoadTable, read))
