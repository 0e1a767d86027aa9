"""What Prometheus can read about each live server. Its series go when it leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from control_plane.jobs.membership import Member
from control_plane.jobs.step import PlannedStep
from control_plane.metrics.metric_set import MetricSet

REMEMBERED_SERVERS = 4096
"""Ids whose registrations are counted beyond their departure: a server that flaps comes back."""


class ServerMetrics:
    """Load, work and registrations of the live servers, under their id."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series = series = MetricSet(registry, "server")
        self._live: set[str] = set()
        self._registered: OrderedDict[str, int] = OrderedDict()
        self._info = series.gauge(
            "server_info", "1 for each live server.", "kind", "host", "device"
        )
        self._registrations = series.counter(
            "server_registrations_total",
            "How often a server of this id has joined since the control plane's start.",
        )
        self._busy_seconds = series.counter(
            "server_busy_seconds_total",
            "Kernel seconds in the steps reported, without waits for other work on the device.",
            "phase",
        )
        self._predicted_seconds = series.counter(
            "server_predicted_seconds_total",
            "Kernel seconds that the plans of the steps reported predicted.",
            "phase",
        )
        self._busy_ratio = series.gauge(
            "server_busy_ratio", "Share of time in kernel calls between the last two heartbeats."
        )
        self._queue_depth = series.gauge(
            "server_queue_depth", "Groups of CA-tasks that wait for the device, at last heartbeat."
        )
        self._open_ticks = series.gauge(
            "server_open_ticks", "Ticks of which some messages have arrived, at last heartbeat."
        )
        self._buffer_bytes = series.gauge(
            "server_buffer_bytes", "Memory of message buffers in use, at last heartbeat."
        )

    def changed(self, members: Iterable[Member]) -> None:
        """A server came or went: ``members`` are those that live."""
        live = {member.server_id: member for member in members}
        for server_id in self._live - live.keys():
            self._series.forget(server_id)
        for server_id in live.keys() - self._live:
            self._joined(live[server_id])
        self._live = set(live)

    def heartbeat(self, member: Member) -> None:
        """A pool server reported its load."""
        server_id, load = member.server_id, member.load
        self._busy_ratio.labels(server_id).set(load.busy_ratio)
        self._queue_depth.labels(server_id).set(load.queued_tasks)
        self._open_ticks.labels(server_id).set(load.open_ticks)
        self._buffer_bytes.labels(server_id).set(load.buffer_bytes)

    def reported(self, record: PlannedStep, server_id: str, n_layers: int) -> None:
        """A live server reported a step for the first time."""
        measured = record.servers[server_id]
        for phase in record.phases:
            self._busy_seconds.labels(server_id, phase).inc(sum(measured.busy_seconds(phase)))
            predicted = record.predicted_phase_seconds(phase, measured, n_layers)
            if predicted is not None:
                self._predicted_seconds.labels(server_id, phase).inc(predicted)

    def _joined(self, member: Member) -> None:
        server_id, description = member.server_id, member.description
        kind = "pool" if member.in_place is None else "in_place"
        self._info.labels(server_id, kind, description.host, description.device).set(1)
        self._registered[server_id] = self._registered.pop(server_id, 0) + 1
        if len(self._registered) > REMEMBERED_SERVERS:
            self._registered.popitem(last=False)
        # The series is new, and goes on where it was when the server left.
        self._registrations.labels(server_id).inc(self._registered[server_id])
