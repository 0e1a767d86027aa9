"""The record of a run: everything that its report shows, as plain data."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class TrainingStep:
    """One training step.

    An imbalance is the busy seconds of the slowest server in each tick over the mean of all
    servers, each summed over the step's ticks: 1.0 is perfect. None is not known (yet).

    Attributes:
        step: from 0.
        loss: mean over all predicted tokens of all ranks, before the update.
        gradient_norm: before clipping.
        tokens: of all ranks.
        step_seconds: wall time on rank 0, comparison with local attention left out.
        wait_seconds: how much of it rank 0 had nothing to compute but what waits for core
            attention; None if that is not known: see ``StepReport.exposed_seconds``.
        home_imbalance: predicted, if nothing moved.
        planned_imbalance: predicted, under the plan.
        measured_imbalance: of the kernel seconds that the servers measured.
        plan_seconds: what the control plane took to plan the step.
    """

    step: int
    loss: float
    gradient_norm: float
    tokens: int
    step_seconds: float
    wait_seconds: float | None = None
    home_imbalance: float | None = None
    planned_imbalance: float | None = None
    measured_imbalance: float | None = None
    plan_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class StepDetail:
    """One step in full.

    Attributes:
        step: which.
        documents: how many documents it has.
        longest_document_tokens: of them.
        servers: name of each server.
        home_seconds: ``[n_ranks]`` predicted kernel seconds of each rank's own documents.
        planned_seconds: ``[n_servers]`` predicted kernel seconds under the plan.
        measured_seconds: ``[n_servers]`` kernel seconds that each server measured; empty when
            they did not arrive.
        reason: why the planner stopped, in its words.
    """

    step: int
    documents: int
    longest_document_tokens: int
    servers: tuple[str, ...]
    home_seconds: tuple[float, ...]
    planned_seconds: tuple[float, ...]
    measured_seconds: tuple[float, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """The largest differences from local attention over the verified steps.

    Attributes:
        steps: how many were compared.
        loss: largest relative difference of the loss.
        gradient: largest, over parameters and steps, of max|g - g'| / max|g'|; max|g'| counts as no
            less than a thousandth of the largest over all parameters.
        parameter: where ``gradient`` was found.
        loss_tolerance, gradient_tolerance: what they may be.
    """

    steps: int
    loss: float
    gradient: float
    parameter: str
    loss_tolerance: float
    gradient_tolerance: float

    @property
    def passed(self) -> bool:
        # Written so that a NaN fails.
        return self.loss <= self.loss_tolerance and self.gradient <= self.gradient_tolerance


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A whole run.

    Attributes:
        name: of the run.
        mode: placement of core attention: pool, in-place or mixed.
        finished: whether all steps were done; False when it was stopped before.
        began: local time at which this process began, ISO 8601.
        model: class and sizes, in words.
        parameters: trainable numbers of the model.
        dtype: of weights and attention.
        data: where the documents come from.
        n_ranks: trainers.
        tokens_per_rank: in a step.
        steps: every step, those before a resume included.
        detail: the step that was most unbalanced at home, in full; None when none was recorded.
        verification: None without ``--verify``.
    """

    name: str
    mode: str
    finished: bool
    began: str
    model: str
    parameters: int
    dtype: str
    data: str
    n_ranks: int
    tokens_per_rank: int
    steps: tuple[TrainingStep, ...]
    detail: StepDetail | None = None
    verification: Verification | None = None

    def to_json(self) -> str:
        """The record as a JSON text."""
        return json.dumps(asdict(self), indent=1)


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of the known values, or None when there is none."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
