"""Backward passes of core attention are not differentiated themselves."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from trainer_client.errors import SessionError


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates ``backward`` of an autograd function, which gives a tuple. Its gradients have no
    gradients: to ask for them, after a pass with ``create_graph=True``, is an error.

    PyTorch's ``once_differentiable`` finds only that its arguments have none. That of a loss which
    is linear in the output has none either, and gradients of gradients would be zeros.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *gradients: Any) -> Any:
        with torch.no_grad():
            found = backward(ctx, *gradients)
        if not torch.is_grad_enabled():
            return found
        graph = torch.empty(0, requires_grad=True)
        return _Refused.apply(graph, *found)  # type: ignore[no-untyped-call]

    return once


class _Refused(torch.autograd.Function):
    """Gradients as they are, in a graph."""

    @staticmethod
    def forward(ctx: Any, graph: torch.Tensor, *found: torch.Tensor | None) -> Any:
        return tuple(None if each is None else each.view_as(each) for each in found)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise SessionError(
            "gradients of gradients of core attention (create_graph=True) are not supported; leave "
            "such a loss out, or train with attn_implementation='eager'"
        )
