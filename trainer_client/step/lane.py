"""Which step and nano-batch the running code belongs to, and how it yields to the other one."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from trainer_client.errors import SessionError
from trainer_client.integrations.checkpointing import Checkpoints
from trainer_client.step.running_step import RunningStep


@dataclass(frozen=True, eq=False)
class Lane:
    """A nano-batch of a running step.

    Attributes:
        running: the step.
        nano_batch: which nano-batch.
        give_way: lets other lanes run; returns when it is this lane's turn again.
    """

    running: RunningStep
    nano_batch: int
    give_way: Callable[[], None] = lambda: None


current_step: ContextVar[RunningStep | None] = ContextVar("distca_step", default=None)
current_lane: ContextVar[Lane | None] = ContextVar("distca_lane", default=None)


def require_step() -> RunningStep:
    """The step whose block encloses the caller.

    Raises:
        SessionError: there is none.
    """
    running = current_step.get()
    if running is None:
        raise SessionError(
            "no step is running in this thread; call the model inside 'with session.step(n):'"
        )
    return running


def require_lane() -> Lane:
    """The nano-batch that the caller computes.

    Raises:
        SessionError: no step is running, or it has several nano-batches and none was chosen.
    """
    # Autograd recomputes checkpoints on a thread of its own, which knows no step.
    region = Checkpoints().recomputed
    lane: Lane | None = region.caller if region else current_lane.get()
    if lane is not None:
        return lane
    running = require_step()
    if running.job.n_nano_batches > 1:
        raise SessionError(
            f"step {running.step} has {running.job.n_nano_batches} nano-batches and the model was "
            "called directly; wrap it in PingPong, or open the session with n_nano_batches=1"
        )
    return Lane(running, 0)
