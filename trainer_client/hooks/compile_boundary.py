"""The boundary of ``torch.compile``: core attention and what lies around it stay out of graphs.

Servers compute it, and lanes take turns inside it: a graph can hold neither. So a graph ends before
it and another one begins after it, as it does at every call that Python alone can make. While a
lane is inside, Dynamo is off in its thread; so a lane finds the thread as it left it, whatever
the other one compiles in between.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import ParamSpec, TypeVar

import torch

from trainer_client.errors import SessionError

_P = ParamSpec("_P")
_R = TypeVar("_R")

_lock = threading.Lock()
_inside = 0
_stance = ExitStack()


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
    """Checks that the caller is not traced into a graph of the whole model, nor transformed."""

    if torch._C._are_functorch_transforms_active():
        raise SessionError(
            "core attention is called in a transform of torch.func; call backward() or "
            "torch.autograd.grad on the loss, or stay in trainer_client.at_home()"
        )
    if torch.compiler.is_exporting():
        raise SessionError(
            "torch.export calls core attention, which no graph can hold; make each stage's module "
            "by hand and give it to PipelineStage"
        )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run the block without compiled code, and compile nothing. Dynamo is slow to import, so it
    is left alone if nothing else has imported it: then nothing is compiled.

    PyTorch has one stance for all threads of a process. If each put back what it had found, the
    last of two threads would put back the first one's, and nothing would be compiled ever after: so
    the first to come sets the stance, and the last to leave puts it back.
    """
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _inside
    with _lock:
        if _inside == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
        _inside += 1


def _leave() -> None:
    global _inside
    with _lock:
        _inside -= 1
        if _inside == 0:
            _stance.close()
