"""The step and nano-batch that the running code belongs to, and how it yields to the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.step.running_step import RunningStep


class Lane:
    """A nano-batch of a step.

    Args:
        begin: begins the step once its plan has come, and says which nano-batch it is. Called where
            somebody first asks for them: what a model computes before its first call of core
            attention does not wait for the plan.

    Attributes:
        give_way: lets other lanes run; returns when it is this lane's turn again.
        beside: the nano-batches that take turns with it, itself among them; empty if none do.
    """

    def __init__(self, begin: Callable[[], tuple[RunningStep, int]]) -> None:
        self._begin = begin
        self._begun: tuple[RunningStep, int] | None = None
        self.give_way: Callable[[], None] = lambda: None
        self.beside = range(0)

    @classmethod
    def of(
        cls,
        running: RunningStep,
        nano_batch: int,
        give_way: Callable[[], None] = lambda: None,
        beside: range = range(0),
    ) -> Lane:
        """The lane of a step that has begun."""
        lane = cls(lambda: (running, nano_batch))
        lane.give_way, lane.beside = give_way, beside
        return lane

    @property
    def has_begun(self) -> bool:
        """Return whether the step has begun."""
        return self._begun is not None

    @property
    def running(self) -> RunningStep:
        """The step."""
        return self._step_and_place()[0]

    @property
    def nano_batch(self) -> int:
        """The nano-batch."""
        return self._step_and_place()[1]

    def _step_and_place(self) -> tuple[RunningStep, int]:
        if self._begun is None:
            self._begun = self._begin()
        return self._begun


current_step: ContextVar[RunningStep | None] = ContextVar("distca_step", default=None)
current_lane: ContextVar[Lane | None] = ContextVar("distca_lane", default=None)


def is_unplanned_evaluation() -> bool:
    """Return whether the caller runs without gradients and outside of a step: core attention is
    computed at home then."""
    return current_step.get() is None and not torch.is_grad_enabled()


def require_step() -> RunningStep:
    """The step whose block encloses the caller."""
    running = current_step.get()
    if running is None:
        raise SessionError(
            "no step is running in this thread; call the model inside 'with session.step(n):'"
        )
    return running


def check_nano_batch(running: RunningStep, index: int) -> None:
    """Checks that ``running`` has nano-batch ``index``."""
    if not 0 <= index < running.job.n_nano_batches:
        raise SessionError(
            f"nano-batch {index} of step {running.step} was chosen; the job has n_nano_batches="
            f"{running.job.n_nano_batches}, numbered from 0"
        )


@contextmanager
def in_nano_batch(index: int) -> Iterator[None]:
    """Code in the block computes nano-batch ``index`` of the running step.

    For loops that call the model once for each microbatch themselves, such as gradient accumulation
    and pipeline schedules; nothing is interleaved. A backward pass needs no block: it knows where
    its forward pass ran.
    """
    running = require_step()
    check_nano_batch(running, index)
    token = current_lane.set(Lane.of(running, index))
    try:
        yield
    finally:
        current_lane.reset(token)


def require_lane() -> Lane:
    """The nano-batch that the caller computes, or that is recomputed."""
    # Autograd recomputes checkpoints on a thread of its own, which knows no step.
    region = Checkpoints().recomputed
    lane: Lane | None = region.caller if region else None
    return require_own_lane() if lane is None else lane


def require_own_lane() -> Lane:
    """The nano-batch that the caller computes, outside of recomputations."""
    lane = current_lane.get()
    if lane is not None:
        return lane
    running = require_step()
    if running.job.n_nano_batches > 1:
        raise SessionError(
            f"step {running.step} has {running.job.n_nano_batches} nano-batches and the model was "
            "called directly; choose one by 'with in_nano_batch(i):', or set n_nano_batches=1"
        )
    return Lane.of(running, 0)
