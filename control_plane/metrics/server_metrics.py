"""The metrics of each live server. Its series go when it leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client import CollectorRegistry

from control_plane.jobs.membership import Member
from control_plane.jobs.step import StepRecord, busy_seconds
from core_attention.ca_task import Phase
from distca.metric_table import Label, Table, counter, gauge

PREFIX = "distca_control_plane"

SERVER_KINDS = ("pool", "in_place")

REMEMBERED_SERVERS = 4096
"""Ids whose registrations are counted beyond their departure: a server that flaps comes back."""


_SERVER = Label("server")
_PHASE = Label("phase", tuple(Phase))


class ServerTable(Table):
    """Load, work and registrations of the live servers, under their id."""

    prefix = PREFIX

    server_info = gauge(
        "1 for each live server.",
        _SERVER,
        Label("kind", SERVER_KINDS),
        Label("host"),
        Label("device"),
    )
    server_registrations_total = counter(
        "How often a pool server of this id has joined since the control plane's start.", _SERVER
    )
    server_busy_seconds_total = counter(
        "Kernel seconds in the steps reported, without waits for other work on the device.",
        _SERVER,
        _PHASE,
    )
    server_predicted_seconds_total = counter(
        "Kernel seconds that the plans of the steps reported predicted.", _SERVER, _PHASE
    )
    server_busy_ratio = gauge(
        "Share of time in kernel calls between the last two heartbeats.", _SERVER
    )
    server_buffer_bytes = gauge("Memory of message buffers in use, at last heartbeat.", _SERVER)


class ServerMetrics:
    """The metrics of live servers, whose series go when they leave."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._series = ServerTable(registry)
        self._live: set[str] = set()
        self._registered: OrderedDict[str, int] = OrderedDict()

    def changed(self, members: Iterable[Member]) -> None:
        """A server came or went: ``members`` are those that live."""
        live = {member.server_id: member for member in members}
        for server_id in self._live - live.keys():
            self._series.forget(server=server_id)
        for server_id in live.keys() - self._live:
            self._joined(live[server_id])
        self._live = set(live)

    def heartbeat(self, member: Member) -> None:
        """A pool server reported its load."""
        server_id, load = member.server_id, member.load
        self._series.server_busy_ratio.labels(server_id).set(load.busy_ratio)
        self._series.server_buffer_bytes.labels(server_id).set(load.buffer_bytes)

    def reported(self, record: StepRecord, server_id: str, n_layers: int) -> None:
        """A live server reported a step for the first time."""
        measured = record.servers[server_id]
        for phase in record.phases:
            self._series.server_busy_seconds_total.labels(server_id, phase).inc(
                sum(busy_seconds(measured, phase))
            )
            predicted = record.predicted_phase_seconds(phase, measured, n_layers)
            if predicted is not None:
                self._series.server_predicted_seconds_total.labels(server_id, phase).inc(predicted)

    def _joined(self, member: Member) -> None:
        server_id, description = member.server_id, member.description
        kind = "pool" if member.in_place is None else "in_place"
        self._series.server_info.labels(server_id, kind, description.host, description.device).set(
            1
        )
        if member.in_place is not None:
            # It comes with each job of its name, however healthy.
            return
        self._registered[server_id] = self._registered.pop(server_id, 0) + 1
        if len(self._registered) > REMEMBERED_SERVERS:
            self._registered.popitem(last=False)
        # The series is new, and goes on where it was when the server left.
        self._series.server_registrations_total.labels(server_id).inc(self._registered[server_id])
