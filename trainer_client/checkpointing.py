"""Activation checkpointing that leaves core attention out.

A checkpointed part of a model is computed again in the backward pass, but core attention is not: it
is the dearest part, and other ranks take part in it. Its output and log-sum-exp are kept from the
forward pass and handed out again when the part is recomputed.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from trainer_client.errors import SessionError
from trainer_client.graphs import outside_graphs

Result = tuple[torch.Tensor, torch.Tensor]
"""o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]`` float32."""


class Region:
    """One checkpointed call: runs once in the forward pass and once when it is recomputed.

    Attributes:
        recomputes: the forward pass is over.
    """

    def __init__(self) -> None:
        self.recomputes = False
        self._kept: deque[Result] = deque()
        self._context = contextvars.copy_context()

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls ``function``; from the second time on as a recomputation, in the context (the step
        and its nano-batch) of the first, whatever thread autograd runs it on."""
        if self.recomputes:
            return self._context.copy().run(self._enter, function, *args, **kwargs)
        try:
            return self._enter(function, *args, **kwargs)
        finally:
            self.recomputes = True

    def keep(self, o: torch.Tensor, lse: torch.Tensor) -> None:
        """Keeps a result for the recomputation."""
        self._kept.append((o.detach(), lse))

    def take(self) -> Result:
        """The oldest result that was not taken yet.

        Raises:
            SessionError: the recomputation calls core attention more often than the forward pass.
        """
        if not self._kept:
            raise SessionError(
                "a checkpointed part of the model calls core attention more often when it is "
                "recomputed than in the forward pass; its course must not depend on the pass"
            )
        return self._kept.popleft()

    def _enter(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        token = _current.set(self)
        try:
            return function(*args, **kwargs)
        finally:
            _current.reset(token)


_current: ContextVar[Region | None] = ContextVar("distca_region", default=None)


@outside_graphs
def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls ``function`` and keeps of its activations only what core attention in it gave; the rest
    is recomputed in the backward pass, as ``torch.utils.checkpoint`` does.

    Args:
        function: a part of the model, for example a layer; deterministic.
        args, kwargs: its arguments.
    """
    region = Region()
    return torch_checkpoint(region.run, function, *args, use_reentrant=False, **kwargs)


def recomputes() -> bool:
    """Whether the caller is in a recomputation."""
    region = _current.get()
    return region is not None and region.recomputes


def kept_result() -> Result | None:
    """In a recomputation: what the next call of core attention gave in the forward pass. None
    otherwise: then core attention is to be run.

    Raises:
        SessionError: there is none left.
    """
    region = _current.get()
    return None if region is None or not region.recomputes else region.take()


def keep_result(o: torch.Tensor, lse: torch.Tensor) -> None:
    """Tells a result of core attention, for the recomputation if there will be one."""
    region = _current.get()
    if region is not None:
        region.keep(o, lse)


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
    ) -> torch.Tensor:
        """``o``, as a function of ``q``, ``k`` and ``v``."""
        o = o.detach()
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Not to be called."""
        raise AssertionError("the graph of a recomputation is not differentiated")
