"""The step and nano-batch that the running code belongs to, and how it yields to the other one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch

from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.step.running_step import RunningStep


@dataclass(frozen=True, eq=False)
class Lane:
    """A nano-batch of a running step.

    Attributes:
        running: the step.
        nano_batch: which nano-batch.
        give_way: lets other lanes run; returns when it is this lane's turn again.
        beside: the nano-batches that take turns with it, itself among them; empty if none do.
    """

    running: RunningStep
    nano_batch: int
    give_way: Callable[[], None] = lambda: None
    beside: range = range(0)


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
    token = current_lane.set(Lane(running, index))
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
    return Lane(running, 0)
