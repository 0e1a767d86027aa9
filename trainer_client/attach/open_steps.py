"""Steps that are a forward and its backward each, several open at a time.

The job has nano-batches for a few steps, and each step has its documents in those of one place, in
rotation. To servers these are lanes, whose ticks do not wait for one another's.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trainer_client.session import Session
from trainer_client.step.lane import Lane
from trainer_client.step.running_step import RunningStep
from trainer_client.turns.manifests import manifest_of_forward

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
    oldest, when as many are open as there are places.

    Args:
        session: of a job whose ranks hold whole documents.
        turns: nano-batches of each step.
    """

    def __init__(self, session: Session, turns: int) -> None:
        self.session = session
        self._turns = turns
        self._n_places = session.options.n_nano_batches // turns
        self._steps: dict[int, _OpenStep] = {}
        self._ended: list[RunningStep] = []

    def begin(self, lengths: Sequence[int]) -> list[Lane]:
        """Plans a step with documents of these lengths on this rank; returns its lanes with rows,
        or the first one.

        Raises:
            PlanNotReady, SessionClosed: as :meth:`Session.begin`.
        """
        session = self.session
        self._sweep()
        step = session.next_step
        place = step % self._n_places
        own = range(place * self._turns, (place + 1) * self._turns)
        if (oldest := self._steps.get(place)) is not None:
            logger.warning(
                "step %d has had no backward pass %d forward passes later and is given up; keep "
                "more open by attach(model, open_steps=...)",
                oldest.running.step,
                self._n_places,
            )
            self._end(oldest.running)
        manifest = manifest_of_forward(step, session.options, lengths, own)
        session.submit(manifest, forward_only=not torch.is_grad_enabled())
        running = session.begin(step)
        running.on_complete = functools.partial(self._completed, place)
        self._steps[place] = _OpenStep(running)
        held = [nano_batch for nano_batch in own if running.n_rows(nano_batch)]
        return [Lane(running, nano_batch) for nano_batch in held or own[:1]]

    def returned(self, lanes: Sequence[Lane], *, failed: bool) -> None:
        """The forward pass of a step is over.

        Raises:
            SessionError: it called core attention less often than the job expects.
        """
        running = lanes[0].running
        self._steps[lanes[0].nano_batch // self._turns].has_returned = True
        try:
            for lane in () if failed else lanes:
                running.lane_returned(lane.nano_batch)
        except BaseException:
            failed = True
            raise
        finally:
            if failed or running.complete:
                self._end(running)

    def close(self, error: str) -> None:
        """Ends what is open, and the session."""
        for step in list(self._steps.values()) if not error else ():
            self._end(step.running)
        self._steps.clear()
        self.session.close(error)

    def _completed(self, place: int) -> None:
        """A backward pass is over that has completed a step; on any thread of autograd."""
        step = self._steps.get(place)
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
            place: step for place, step in self._steps.items() if step.running is not running
        }
        if not running.complete:
            self.session.stop(running)
        self.session.end(running, "" if running.complete else "its forward or backward pass failed")
        self._ended.append(running)
