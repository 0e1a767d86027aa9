"""Steps that are a forward and its backward each, several open at a time.

The job has a few nano-batches, and each step has all of its documents in one of them, by turns. To
servers these are lanes, whose ticks do not wait for one another's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core_attention.manifest import RankManifest
from trainer_client.session import Session
from trainer_client.step.lane import Lane
from trainer_client.step.running_step import RunningStep

logger = logging.getLogger(__name__)


@dataclass
class _OpenStep:
    """A step whose backward pass is to come; ``has_returned``: its forward is over."""

    running: RunningStep
    has_returned: bool = False


class OpenSteps:
    """The steps of a session.

    A step ends with the backward pass that computes its last gradients, at the latest where the
    caller of ``backward`` goes on. One whose graph is gone ends when the next begins; and the
    oldest, when as many are open as there are nano-batches.

    Args:
        session: of a job whose ranks hold whole documents.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self._n_lanes = session.options.n_nano_batches
        self._steps: dict[int, _OpenStep] = {}
        self._ended: list[RunningStep] = []

    def begin(self, lengths: Sequence[int]) -> Lane:
        """Plans a step with documents of these lengths on this rank.

        Raises:
            PlanNotReady, SessionClosed: as :meth:`Session.begin`.
        """
        session = self.session
        self._sweep()
        step = session.next_step
        nano_batch = step % self._n_lanes
        if (oldest := self._steps.get(nano_batch)) is not None:
            logger.warning(
                "step %d has had no backward pass %d forward passes later and is given up; keep "
                "more open by attach(model, open_steps=...)",
                oldest.running.step,
                self._n_lanes,
            )
            self._end(oldest.running)
        lanes = [lengths if lane == nano_batch else [] for lane in range(self._n_lanes)]
        manifest = RankManifest.from_lengths(step, session.options.rank, lanes)
        session.submit(manifest, forward_only=not torch.is_grad_enabled())
        running = session.begin(step)
        running.on_complete = functools.partial(self._completed, nano_batch)
        self._steps[nano_batch] = _OpenStep(running)
        return Lane(running, nano_batch)

    def returned(self, lane: Lane, *, failed: bool) -> None:
        """The forward pass of a step is over.

        Raises:
            SessionError: it called core attention less often than the job expects.
        """
        step = self._steps[lane.nano_batch]
        step.has_returned = True
        try:
            if not failed:
                lane.running.lane_returned(lane.nano_batch)
        except BaseException:
            failed = True
            raise
        finally:
            if failed or lane.running.complete:
                self._end(lane.running)

    def close(self, error: str) -> None:
        """Ends what is open, and the session."""
        for step in list(self._steps.values()) if not error else ():
            self._end(step.running)
        self._steps.clear()
        self.session.close(error)

    def _completed(self, nano_batch: int) -> None:
        """A backward pass is over that has completed a step; on any thread of autograd."""
        step = self._steps.get(nano_batch)
        if step is not None and step.running.complete:
            self._end(step.running)

    def _sweep(self) -> None:
        """Ends steps whose graph is gone, and looks at those that have ended."""
        for step in list(self._steps.values()):
            if step.running.complete or (step.has_returned and not step.running.calls):
                self._end(step.running)
        self.session.report_ended()
        while self._ended:
            self._ended.pop().check_arguments()

    def _end(self, running: RunningStep) -> None:
        self._steps = {
            lane: step for lane, step in self._steps.items() if step.running is not running
        }
        if not running.complete:
            self.session.stop(running)
        self.session.end(running, "" if running.complete else "its forward or backward pass failed")
        self._ended.append(running)
