"""What planner and servers said about a step, as plain numbers for its record."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.message import reply_layout, request_layout
from core_attention.plan import Plan, SlotForecast
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from distca.contract.codec import plan_from_proto
from distca.report.record import StepDetail, TimelineEvent
from distca.v1 import jobs_pb2


@dataclass(frozen=True, eq=False, kw_only=True)
class StepMeasurements:
    """One step's forecasts and measurements.

    Rows of the arrays are ticks of a layer: (phase, nano-batch), forward first.

    Attributes:
        plan: whole, with its forecasts.
        plan_seconds: what it took to make.
        home_seconds: ``[n_ticks, n_ranks]`` predicted if nothing moved.
        planned_seconds: ``[n_ticks, n_servers]`` predicted under the plan.
        measured_seconds: ``[n_ticks, n_servers]`` kernel seconds, or None while a server that has
            work has not reported.
    """

    plan: Plan
    plan_seconds: float
    home_seconds: Float64Array
    planned_seconds: Float64Array
    measured_seconds: Float64Array | None

    @classmethod
    def from_proto(cls, response: jobs_pb2.GetStepResponse) -> StepMeasurements:
        """Reads what the control plane tells about a step.

        Raises:
            distca.contract.codec.WireError: the response is malformed.
        """
        plan = plan_from_proto(response.plan)
        forecasts = [plan.forecast(phase) for phase in Phase]
        home = np.concatenate([f.home_seconds for f in forecasts if f is not None])
        planned = np.concatenate([f.seconds for f in forecasts if f is not None])
        return cls(
            plan=plan,
            plan_seconds=response.plan_seconds,
            home_seconds=home,
            planned_seconds=planned,
            measured_seconds=_measured(plan, response.servers),
        )

    @property
    def home_imbalance(self) -> float:
        """Of ticks, or of a pipeline's slots over their levels, if nothing moved."""
        slots = self.plan.slots
        return tick_imbalance(self.home_seconds) if slots is None else slots.home_imbalance

    @property
    def planned_imbalance(self) -> float:
        """The same under the plan."""
        slots = self.plan.slots
        return tick_imbalance(self.planned_seconds) if slots is None else slots.step_imbalance

    @property
    def measured_imbalance(self) -> float | None:
        """The same of what servers measured; None while one has not reported."""
        if self.measured_seconds is None:
            return None
        slots = self._measured_slots
        return tick_imbalance(self.measured_seconds) if slots is None else slots.step_imbalance

    @property
    def _measured_slots(self) -> SlotForecast | None:
        slots, seconds = self.plan.slots, self.measured_seconds
        return None if slots is None or seconds is None else slots.measured(seconds.sum(axis=0))

    def detail(
        self, shape: AttentionShape, n_layers: int, timeline: Iterable[TimelineEvent]
    ) -> StepDetail:
        """The step in full, for the report. Forecasts are per layer, so they are multiplied."""
        request, reply = _bytes(self.plan, shape)
        measured, slots, measured_slots = (
            self.measured_seconds,
            self.plan.slots,
            self._measured_slots,
        )
        return StepDetail(
            step=self.plan.step,
            documents=self.plan.manifest.n_texts,
            longest_document_tokens=int(self.plan.manifest.document_length.max()),
            servers=tuple(server.server_id for server in self.plan.servers),
            home_seconds=_totals(self.home_seconds * n_layers),
            planned_seconds=_totals(self.planned_seconds * n_layers),
            measured_seconds=() if measured is None else _totals(measured),
            request_bytes=_rows(request * n_layers),
            reply_bytes=_rows(reply * n_layers),
            reason=self.plan.reason,
            timeline=tuple(timeline),
            planned_slots=() if slots is None else tuple(slots.imbalance.tolist()),
            measured_slots=(
                () if measured_slots is None else tuple(measured_slots.imbalance.tolist())
            ),
        )


def tick_imbalance(seconds: Float64Array) -> float:
    """Time of the slowest member in each tick over the mean of all, both summed over the ticks.

    Ticks follow one another, so this is how much longer core attention takes than if every tick
    were balanced perfectly.

    Args:
        seconds: ``[n_ticks, n_members]``.
    """
    mean = float(seconds.mean(axis=1).sum())
    return float(seconds.max(axis=1).sum()) / mean if mean > 0 else 1.0


def _measured(plan: Plan, reports: Iterable[jobs_pb2.ServerMeasurement]) -> Float64Array | None:
    """``[n_ticks, n_servers]``; a server without tasks does not report and counts as 0."""
    n_nano_batches = plan.manifest.n_nano_batches
    seconds = np.zeros((len(Phase) * n_nano_batches, len(plan.servers)))
    reported = set()
    for report in reports:
        index = plan.server_index(report.server_id)
        if index is not None:
            reported.add(index)
            forward, backward = report.forward_busy_seconds, report.backward_busy_seconds
            seconds[: len(forward), index] = forward
            seconds[n_nano_batches : n_nano_batches + len(backward), index] = backward
    busy = {int(index) for phase in Phase for index in np.unique(plan.tasks(phase).server)}
    return seconds if busy <= reported else None


def _bytes(plan: Plan, shape: AttentionShape) -> tuple[Int64Array, Int64Array]:
    """``[n_ranks, n_servers]`` bytes of requests and of replies in one layer, both phases.

    What a rank exchanges with its own in-place server is not copied: 0.
    """
    request = np.zeros((plan.manifest.n_ranks, len(plan.servers)), dtype=np.int64)
    reply = np.zeros_like(request)
    for phase in Phase:
        for nano_batch in range(plan.manifest.n_nano_batches):
            routes = derive_routes(plan.manifest, plan.tasks(phase), nano_batch)
            for (rank, server), route in routes.items():
                if plan.servers[server].in_place_rank != rank:
                    request[rank, server] += request_layout(route, shape, phase).nbytes
                    reply[rank, server] += reply_layout(route, shape, phase).nbytes
    return request, reply


def _totals(seconds: Float64Array) -> tuple[float, ...]:
    return tuple(float(value) for value in seconds.sum(axis=0))


def _rows(matrix: Int64Array) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(value) for value in row) for row in matrix)
