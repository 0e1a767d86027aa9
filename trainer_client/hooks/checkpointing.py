"""Activation checkpoints leave core attention out.

A checkpointed part of a model is computed again in the backward pass, but core attention is not: it
is the dearest part, and other ranks take part in it. Its output and log-sum-exp are kept from the
forward pass and handed out again when the part is recomputed.

This holds for every checkpoint made by ``torch.utils.checkpoint`` with ``use_reentrant=False``:
PyTorch's own function, FSDP's ``checkpoint_wrapper`` and transformers'
``gradient_checkpointing_enable()``. They are known by the hooks that they put on saved tensors.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from traceback import walk_tb
from types import GeneratorType
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint as torch_checkpoints
from torch.utils.checkpoint import _CheckpointFrame
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from trainer_client.errors import SessionError
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.hooks.thread_state import saved_tensor_hooks

Result = tuple[torch.Tensor, torch.Tensor]
"""o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]`` float32."""

_HOOK_DEPTH = 3
"""PyTorch wraps the hook of a recomputation, so that it is not compiled."""


class _Kept(NamedTuple):
    """A result of core attention, in memory that its caller's model may write to."""

    caller: Any
    result: Unwritten


class CheckpointedCall:
    """One checkpointed call: what core attention gave in it."""

    def __init__(self) -> None:
        self._kept: deque[_Kept] = deque()

    def keep(self, caller: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Keeps what ``caller``, a lane, got for the recomputation."""
        result = Unwritten("activation checkpoint", {"o": o, "lse": lse})
        with _lock:
            self._kept.append(_Kept(caller, result))

    @property
    def is_over(self) -> bool:
        """Return whether all results were taken."""
        return not self._kept

    @property
    def caller(self) -> Any:
        """The maker of the call that is recomputed next."""

        return self._next().caller

    def take(self) -> Result:
        """The oldest result that was not taken yet."""

        result = self._next().result.get()
        with _lock:
            self._kept.popleft()
        return result["o"], result["lse"]

    def forget(self, running: Any) -> None:
        """Drops what lanes of the step ``running`` got: nothing of it is recomputed any more."""
        with _lock:
            # What is computed at home, or without rows, is no lane's.
            self._kept = deque(
                each for each in self._kept if getattr(each.caller, "running", None) is not running
            )

    def _next(self) -> _Kept:
        if not self._kept:
            raise SessionError(
                "a checkpointed part calls core attention more often when it is recomputed than "
                "in the forward pass, or is recomputed twice; run backward once"
            )
        return self._kept[0]


_regions: weakref.WeakKeyDictionary[_CheckpointFrame, CheckpointedCall] = (
    weakref.WeakKeyDictionary()
)

_lock = threading.RLock()
"""Held while a region, or which there are, changes: several threads of a process may each train as
a rank, and the end of a step in one looks at the regions of all. What is let go under it may be the
last hold of objects whose end comes back here."""


@outside_graphs
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` and keeps of its activations only what core attention in it gave; the rest
    is recomputed in the backward pass. This is ``torch.utils.checkpoint`` with
    ``use_reentrant=False``.

    Args:
        function: a part of the model, for example a layer; deterministic.
        args, kwargs: its arguments.
    """
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


class Checkpoints:
    """The checkpointed parts that enclose a call of core attention."""

    def __init__(self) -> None:
        self._forward: list[CheckpointedCall] = []
        self._recomputed: CheckpointedCall | None = None
        for frame, recomputes in _frames():
            with _lock:
                region = _regions.setdefault(frame, CheckpointedCall())
            if recomputes:
                # What encloses a recomputation has kept its own results before.
                self._recomputed = region
                break
            self._forward.append(region)

    @property
    def recomputed(self) -> CheckpointedCall | None:
        """The part that is recomputed; None in a forward pass."""

        if self._recomputed is None and torch._C._current_graph_task_id() >= 0:
            raise SessionError(
                "an activation checkpoint calls core attention again in the backward pass; use "
                "torch.utils.checkpoint with use_reentrant=False or trainer_client.checkpoint"
            )
        return self._recomputed

    def keep(self, caller: Any, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Keeps a result for the recomputations that there will be; see
        :meth:`CheckpointedCall.keep`."""
        for region in self._forward:
            region.keep(caller, o, lse)


HOME = object()
"""Stands for the lane in checkpoints of parts that are computed at home."""


def keep_nothing(like: torch.Tensor) -> None:
    """A call is computed at home, and again wherever checkpoints around it are recomputed."""
    checkpoints = Checkpoints()
    if checkpoints.recomputed:
        checkpoints.recomputed.take()
    else:
        nothing = like.new_empty(0)
        checkpoints.keep(HOME, nothing, nothing)


def recomputed_caller() -> Any:
    """The maker, such as a lane, of the next call of core attention that the caller's recomputation
    of a checkpoint comes to; None outside of one, or if there is none."""
    for frame, recomputed in _frames():
        if recomputed:
            region = _regions.get(frame)
            return None if region is None or region.is_over else region.caller
    return None


def recomputes() -> bool:
    """Return whether the caller is in the recomputation of a checkpoint."""
    return any(recomputed for _, recomputed in _frames())


def forget_step(running: Any) -> None:
    """Drops what checkpoints have kept of a step that has ended. Where it has failed, what they
    kept leads to its lanes, these to what autograd has saved, and that back to the checkpoints."""
    with _lock:
        regions = list(_regions.values())
    for region in regions:
        region.forget(running)


def end_checkpoints(error: BaseException) -> None:
    """Leaves the checkpoints that ``error`` has come out of, while the thread's hooks are theirs.

    A PyTorch that does not hand the error to the checkpoint's contexts, as 2.13 does, leaves them
    when the traceback is forgotten, and takes away the innermost hooks that the thread has by then.
    """
    for frame, _ in reversed(list(walk_tb(error.__traceback__))):
        if frame.f_code.co_filename == torch_checkpoints.__file__:
            for value in frame.f_locals.values():
                if isinstance(value, GeneratorType) and not value.gi_running:
                    value.close()


def in_checkpoint() -> bool:
    """Return whether the caller is in a checkpointed part, in its forward pass or its
    recomputation."""
    return next(_frames(), None) is not None


def _frames() -> Iterator[tuple[_CheckpointFrame, bool]]:
    """The checkpoints around the caller, the innermost first, and whether each is recomputed."""
    for pack, _ in saved_tensor_hooks():
        found = _frame_of(pack, _HOOK_DEPTH)
        if found is not None:
            yield found


def _frame_of(hook: Any, depth: int) -> tuple[_CheckpointFrame, bool] | None:
    """The checkpoint whose hook this is. In a forward pass the hook holds the frame itself, in a
    recomputation a weak reference to it."""
    for cell in getattr(hook, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, _CheckpointFrame):
            return held, False
        if isinstance(held, weakref.ref) and isinstance(frame := held(), _CheckpointFrame):
            return frame, True
        if callable(held) and depth and (found := _frame_of(held, depth - 1)):
            return found
    return None


class Recomputed(torch.autograd.Function):
    """Stands for core attention in a recomputation: saves what the true operation saved, in the
    same order, which is what ``torch.utils.checkpoint`` goes by. Its backward is never run."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``o`` and ``lse``, as functions of ``q``, ``k`` and ``v``."""
        o, lse = o.detach(), lse.detach()
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Not to be called."""
        raise AssertionError("the graph of a recomputation is not differentiated")
