"""What ``torch.compile`` leaves out of its graphs: core attention and what lies around it.

Servers compute it, and lanes take turns inside it: a graph can hold neither. So a graph ends before
it and another one begins after it, as it does at every call that Python alone can make. While a
lane is inside, Dynamo is off in its thread; so a lane finds the thread as it left it, whatever
the other one compiles in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from trainer_client.errors import SessionError

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_graphs(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates a function that graphs end before; with ``fullgraph=True`` Dynamo refuses it with
    the reason given here."""
    kept_out: Callable[_P, _R] = torch.compiler.disable(
        function,
        reason="core attention is computed by servers, outside of all graphs; compile without "
        "fullgraph=True",
    )
    return kept_out


def refuse_tracing() -> None:
    """Checks that the caller is not traced into a graph of the whole model, nor transformed.

    Raises:
        SessionError: ``torch.export`` or a transform of ``torch.func`` runs.
    """
    if torch._C._are_functorch_transforms_active():
        raise SessionError(
            "core attention is called in a transform of torch.func (grad, vjp, jvp, vmap), which "
            "cannot see through it: call backward() or torch.autograd.grad on the loss, or compute "
            "the transform with core attention at home, in trainer_client.at_home()"
        )
    if torch.compiler.is_exporting():
        raise SessionError(
            "torch.export calls core attention, which servers compute: no graph can hold it. "
            "pipeline() of torch.distributed.pipelining traces models so; make each stage's module "
            "by hand and give it to PipelineStage"
        )
