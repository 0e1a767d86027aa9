"""What was compiled, run as it was written."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

_lock = threading.Lock()
_inside = 0
_stance = ExitStack()


@contextmanager
def uncompiled() -> Iterator[None]:
    """In the block, nothing compiled runs and nothing is compiled. Dynamo is slow to import, so it
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
