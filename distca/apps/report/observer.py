"""Rank 0's observer: asks the control plane what the servers measured in each step."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from distca.apps.report.measurements import StepMeasurements, tick_imbalance
from distca.apps.report.record import StepDetail, TrainingStep
from distca.apps.report.summary import WARMUP_STEPS
from distca.contract import rpc
from trainer_client import Session

logger = logging.getLogger(__name__)

_PATIENCE_STEPS = 4
"""After so many further steps, what has not come is given up."""
_FINAL_SECONDS = 3.0
_RETRY_SECONDS = 0.02


class Observer:
    """Completes the steps of a run.

    Args:
        session: that serves them.
        first: the first one of this process, which is step 0 of the session.
        write: called with every step, in order, once nothing more is to be known of it.
    """

    def __init__(self, session: Session, first: int, write: Callable[[TrainingStep], None]) -> None:
        self._session, self._first, self._write = session, first, write
        self._pending: deque[TrainingStep] = deque()
        self._detail_rank: tuple[bool, float] = (False, 0.0)
        self.detail: StepDetail | None = None
        """The step that was most unbalanced at home, first steps left out where others are."""

    def step_done(self, record: TrainingStep) -> None:
        """Notes a finished step, and what has become known about those before it."""
        self._pending.append(record)
        while self._pending and (
            self._is_known(self._pending[0]) or len(self._pending) > _PATIENCE_STEPS
        ):
            self._write(self._pending.popleft())

    def finish(self) -> None:
        """Waits a moment for the measurements of the last steps."""
        deadline = time.monotonic() + _FINAL_SECONDS
        while self._pending:
            if self._is_known(self._pending[0]) or time.monotonic() > deadline:
                self._write(self._pending.popleft())
            else:
                time.sleep(_RETRY_SECONDS)

    def _is_known(self, record: TrainingStep) -> bool:
        """Completes the first of the pending records as far as possible; returns whether nothing is
        missing any more."""
        number = record.step - self._first
        self._session.report_ended()
        report = next((each for each in self._session.reports if each.step == number), None)
        try:
            found = StepMeasurements.from_proto(self._session.fetch_step(number))
        except rpc.RpcError as error:
            logger.warning("step %d: its plan cannot be shown: %s", record.step, error)
            return True
        self._pending[0] = replace(
            record,
            wait_seconds=None if report is None else report.exposed_seconds,
            plan_seconds=found.plan_seconds,
            home_imbalance=tick_imbalance(found.home_seconds),
            planned_imbalance=tick_imbalance(found.planned_seconds),
            measured_imbalance=found.measured_imbalance,
        )
        if report is None or found.measured_seconds is None:
            return False
        rank = (number >= WARMUP_STEPS, tick_imbalance(found.home_seconds))
        if rank > self._detail_rank:
            self._detail_rank = rank
            self.detail = found.detail(record.step, self._session.options.n_layers)
        return True
