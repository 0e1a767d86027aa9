"""Steps that are a forward and its backward each, several open at a time.

The job has nano-batches for a few steps, and each step has its documents in those of one place. To
servers these are lanes, whose ticks do not wait for one another's. The control plane numbers the
steps: ranks may make unlike numbers of forwards.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core_attention.step_lane import place_of
from distca.v1 import jobs_pb2
from trainer_client.attach.ahead import fetched
from trainer_client.attach.scalars import Throughput
from trainer_client.session import Session
from trainer_client.step.lane import Lane
from trainer_client.step.running_step import RunningStep
from trainer_client.turns.branches import RowDocuments
from trainer_client.turns.manifests import manifest_of_forward

logger = logging.getLogger(__name__)


@dataclass
class _OpenStep:
    """A step whose backward pass is to come; ``has_returned``: its forward is over; ``is_last``: a
    collective of all ranks follows its backward."""

    running: RunningStep
    is_last: bool
    has_returned: bool = False


@dataclass
class _Round:
    """The round that a rank is in; it ends with a collective of all ranks after a backward pass.

    Attributes:
        is_known: something says which forward is the last.
        number: counts the rounds.
        is_closed: the last forward has begun, or the first of several that are the last.
    """

    is_known: bool = False
    number: int = 0
    is_closed: bool = False
    _is_over: bool = False

    def begins(self, is_last: bool | None) -> None:
        """A forward begins; None: nobody says whether it is the last."""
        self.is_known = is_last is not None
        if self._is_over:
            self.number += 1
            self.is_closed = self._is_over = False
        self.is_closed = self.is_closed or bool(is_last)

    def ends(self) -> None:
        """The backward pass of a last forward is over."""
        self._is_over = self.is_closed


class OpenSteps:
    """The steps of a session.

    A step ends with the backward pass that computes its last gradients, at the latest where the
    caller of ``backward`` goes on. One whose graph is gone ends when the next begins; and the
    oldest, when as many are open as there are places.

    Args:
        session: of a job whose ranks hold whole documents.
        turns: nano-batches of each step.

    Attributes:
        throughput: of forwards with gradients.
    """

    def __init__(self, session: Session, turns: int) -> None:
        self.session = session
        self.throughput = Throughput()
        self._turns = turns
        self._n_places = session.options.n_nano_batches // turns
        self._steps: dict[int, _OpenStep] = {}
        self._ended: list[RunningStep] = []
        self._round = _Round()
        self._follows_loader = False
        # A forward has come, and nobody has asked for its plan.
        self._is_planning = False
        # Handed in before its forward: which hand-in, and its documents.
        self._early: tuple[int, RowDocuments] | None = None
        fetched.watchers.append(self._hand_in_early)

    def begin(self, wanted: RowDocuments, is_last: bool | None) -> list[Lane]:
        """Has a step planned with documents on this rank; returns its lanes with rows, or the first
        one. A single lane waits for the plan, several have it.

        Args:
            wanted: the documents, in packed order.
            is_last: see :func:`trainer_client.hooks.gradient_sync.is_last_of_round`.
        """
        session = self.session
        self._sweep()
        self._round.begins(is_last)
        if len(self._steps) == self._n_places:
            self._give_up_oldest()
        with_gradients = torch.is_grad_enabled()
        if with_gradients:
            self._follows_loader = fetched.take(wanted)
            self.throughput.count(wanted)
        early, self._early = self._early, None
        if early is not None and early[1] == wanted and with_gradients:
            sequence = early[0]
            session.tell(self._joining(sequence))
        else:
            sequence = self._join(wanted, self._joining(), forward_only=not with_gradients)
        self._is_planning = True
        lane = Lane(functools.partial(self._begin_step, sequence, bool(is_last)))
        if self._turns == 1:
            return [lane]
        running, own = lane.running, range(lane.nano_batch, lane.nano_batch + self._turns)
        held = [nano_batch for nano_batch in own if running.n_rows(nano_batch)]
        return [Lane.of(running, each) for each in held or own[:1]]

    def _begin_step(self, sequence: int, is_last: bool) -> tuple[RunningStep, int]:
        """Begins the step that a hand-in has joined; returns it with its first nano-batch."""
        running = self.session.begin_joined(sequence)
        place = place_of(running.step, self.session.options.n_nano_batches, self._turns)
        running.on_complete = functools.partial(self._completed, place)
        self._steps[place] = _OpenStep(running, is_last)
        self._is_planning = False
        self._hand_in_early()
        return running, place * self._turns

    def begin_without_rows(self, is_last: bool | None) -> None:
        """A forward begins that has no documents: others do not wait for it."""
        self._sweep()
        self._round.begins(is_last)
        fetched.take(RowDocuments([]))
        if is_last is not None:
            self.session.tell(self._joining())

    def end_without_rows(self) -> None:
        """The backward pass of a last forward without documents begins."""
        self._round.ends()

    def returned(self, lanes: Sequence[Lane], *, failed: bool) -> None:
        """The forward pass of a step is over. One that failed before its step began leaves a
        hand-in, which the next one makes void."""
        if failed and not lanes[0].has_begun:
            return
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
        fetched.watchers.remove(self._hand_in_early)
        for step in list(self._steps.values()) if not error else ():
            self._end(step.running)
        self._steps.clear()
        if not error:
            # Ahead of forwards that do not come.
            self.session.skip_before(sys.maxsize)
        self.session.close(error)

    def _hand_in_early(self) -> None:
        """Hands in the next batch that was fetched, if there is a place for it.

        A rank of several that does not know where its round ends hands in none: others could be
        planned with a step that it runs only when they have come to a collective behind theirs."""
        documents = fetched.next
        knows = self._round.is_known or self.session.options.n_ranks == 1
        is_free = self._early is None and not self._is_planning
        has_room = is_free and len(self._steps) < self._n_places
        if documents is None or not documents.lengths:
            return
        if knows and has_room and self._follows_loader:
            joining = self._joining(awaited=False)
            self._early = self._join(documents, joining, forward_only=False), documents

    def _join(
        self, documents: RowDocuments, joining: jobs_pb2.Joining, *, forward_only: bool
    ) -> int:
        own = range(self._turns)
        manifest = manifest_of_forward(0, self.session.options, documents, own)
        return self.session.join(manifest, joining, forward_only=forward_only)

    def _joining(self, sequence: int = 0, *, awaited: bool = True) -> jobs_pb2.Joining:
        return jobs_pb2.Joining(
            sequence=sequence,
            awaited=awaited,
            round=self._round.number if self._round.is_known else None,
            closes_round=self._round.is_closed,
            open_places=self._steps.keys(),
            turns=self._turns,
        )

    def _give_up_oldest(self) -> None:
        oldest = min(self._steps.values(), key=lambda step: step.running.step)
        logger.warning(
            "step %d has had no backward pass %d forward passes later and is given up; keep "
            "more open by attach(model, open_steps=...)",
            oldest.running.step,
            self._n_places,
        )
        self._end(oldest.running)

    def _completed(self, place: int) -> None:
        """A backward pass is over that has completed a step; on any thread of autograd."""
        step = self._steps.get(place)
        if step is not None and step.running.complete:
            if step.is_last:
                self._round.ends()
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
