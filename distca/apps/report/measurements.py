"""Forecasts of the planner and measurements of the servers for a step, as plain numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase
from core_attention.plan import Plan
from distca.apps.report.record import StepDetail
from distca.contract.codec import plan_from_proto
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
        """Reads what the control plane knows of a step."""
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
    def measured_imbalance(self) -> float | None:
        """The imbalance of what servers measured; None while one has not reported."""
        return None if self.measured_seconds is None else tick_imbalance(self.measured_seconds)

    def detail(self, step: int, n_layers: int) -> StepDetail:
        """The step in full, by its number in the run. Forecasts are per layer, so they are
        multiplied."""
        measured = self.measured_seconds
        return StepDetail(
            step=step,
            documents=self.plan.manifest.n_texts,
            longest_document_tokens=int(self.plan.manifest.document_length.max()),
            servers=tuple(server.server_id for server in self.plan.servers),
            home_seconds=_totals(self.home_seconds * n_layers),
            planned_seconds=_totals(self.planned_seconds * n_layers),
            measured_seconds=() if measured is None else _totals(measured),
            reason=self.plan.reason,
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


def _totals(seconds: Float64Array) -> tuple[float, ...]:
    return tuple(float(value) for value in seconds.sum(axis=0))
