"""Rank 0's observer: writes the step log, and asks the control plane what the servers measured."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from distca.apps.report.measurements import StepMeasurements, tick_imbalance
from distca.apps.report.record import StepDetail, TimelineEvent, TrainingStep
from distca.apps.report.step_log import StepLog
from distca.apps.report.summary import WARMUP_STEPS
from distca.contract import rpc
from distca.v1 import jobs_pb2

logger = logging.getLogger(__name__)

_PATIENCE_STEPS = 4
"""After so many further steps, a report that has not come is given up."""
_FINAL_SECONDS = 3.0
_RETRY_SECONDS = 0.1


@dataclass
class _Pending:
    """A step whose measurements are not complete."""

    record: TrainingStep
    timeline: Sequence[TimelineEvent]


class Observer:
    """Follows the steps of a run.

    Args:
        fetch_step: asks the control plane for a step's plan and measurements.
        log: where the steps are written.
        n_layers: core-attention calls in one forward.
        show: called with every record that is written.
    """

    def __init__(
        self,
        fetch_step: Callable[[int], jobs_pb2.GetStepResponse],
        log: StepLog,
        n_layers: int,
        show: Callable[[TrainingStep], None],
    ) -> None:
        self._fetch_step = fetch_step
        self._log = log
        self._n_layers = n_layers
        self._show = show
        self._pending: deque[_Pending] = deque()
        self._steps_seen = 0
        self._detail_rank: tuple[bool, float] = (False, 0.0)
        self.detail: StepDetail | None = None
        """The step that was most unbalanced at home, first steps left out where others are."""

    def step_done(self, record: TrainingStep, timeline: Sequence[TimelineEvent]) -> None:
        """Notes a finished step, and what has become known about those before it."""
        self._steps_seen += 1
        earlier = len(self._pending)
        self._pending.append(_Pending(record, timeline))
        for index in range(earlier + 1):
            pending = self._pending.popleft()
            patient = record.step - pending.record.step < _PATIENCE_STEPS
            if not self._resolve(pending, is_new=index == earlier) and patient:
                self._pending.append(pending)

    def finish(self) -> None:
        """Waits a moment for the measurements of the last steps."""
        deadline = time.monotonic() + _FINAL_SECONDS
        while self._pending:
            pending = self._pending.popleft()
            if not self._resolve(pending, is_new=False):
                if time.monotonic() > deadline:
                    logger.warning("step %d: measurements are missing", pending.record.step)
                    continue
                self._pending.append(pending)
                time.sleep(_RETRY_SECONDS)

    def _resolve(self, pending: _Pending, *, is_new: bool) -> bool:
        """Completes a record as far as possible; returns whether nothing is missing any more."""
        try:
            found = StepMeasurements.from_proto(self._fetch_step(pending.record.step))
        except rpc.RpcError as error:
            logger.warning("step %d: its plan cannot be shown: %s", pending.record.step, error)
            self._write(pending.record)
            return True
        measured = found.measured_seconds
        pending.record = replace(
            pending.record,
            plan_seconds=found.plan_seconds,
            home_imbalance=tick_imbalance(found.home_seconds),
            planned_imbalance=tick_imbalance(found.planned_seconds),
            measured_imbalance=found.measured_imbalance,
        )
        if measured is not None:
            self._consider_for_detail(pending, found)
        if is_new or measured is not None:
            self._write(pending.record)
        return measured is not None

    def _write(self, record: TrainingStep) -> None:
        self._log.append(record)
        self._show(record)

    def _consider_for_detail(self, pending: _Pending, found: StepMeasurements) -> None:
        rank = (self._steps_seen > WARMUP_STEPS, tick_imbalance(found.home_seconds))
        if rank > self._detail_rank:
            self._detail_rank = rank
            self.detail = found.detail(self._n_layers, pending.timeline)
