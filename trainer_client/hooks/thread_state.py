"""PyTorch's settings that blocks change, where several lanes take turns on one thread.

A lane that gives way inside ``torch.no_grad``, ``torch.autocast``, ``sdpa_kernel``, a stream, a
mode or an activation checkpoint (whose hooks take what autograd saves) must not change the other
lane's, nor what is set after both.
Random numbers are a lane's own too: see :mod:`trainer_client.hooks.lane_random`.
``torch.inference_mode`` cannot be changed from outside its block: enter it around all lanes, not
inside one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

_DEVICE_TYPES = ("cpu", "cuda")

Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class ThreadState:
    """Settings of the calling thread at the time of its making."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._dtype = torch.get_default_dtype()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in _DEVICE_TYPES
        }
        self._stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
        self._hooks = saved_tensor_hooks()
        self._modes = [stack.modes() for stack in _MODE_STACKS]
        self._sdpa = _sdpa_choice()

    def restore(self) -> None:
        """Sets the calling thread to it."""
        torch.set_grad_enabled(self._grad)
        torch.set_default_dtype(self._dtype)
        torch.set_autocast_cache_enabled(self._cache)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        if self._stream is not None and self._stream != torch.cuda.current_stream():
            torch.cuda.set_stream(self._stream)
        _take_hooks()
        _put_hooks(self._hooks)
        for stack, modes in zip(_MODE_STACKS, self._modes, strict=True):
            stack.replace(modes)
        if self._sdpa != _sdpa_choice():
            _choose_sdpa(*self._sdpa)


def _sdpa_choice() -> tuple[list[bool], list[int]]:
    """The backends that PyTorch's own attention may use, and the order in which it takes them."""
    return [enabled() for enabled, _ in _SDPA], torch._C._get_sdp_priority_order()


def _choose_sdpa(enabled: list[bool], order: list[int]) -> None:
    for (_, enable), its in zip(_SDPA, enabled, strict=True):
        enable(its)
    torch._C._set_sdp_priority_order(order)


_SDPA = tuple(
    (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
    for name in ("cudnn", "flash", "mem_efficient", "math", "overrideable")
)
"""Getter and setter of each backend's switch."""


class _ModeStack:
    """The modes that see every operation of a thread, such as those of a selective checkpoint."""

    def __init__(
        self,
        modes: Callable[[], list[Any]],
        push: Callable[[Any], None],
        pop: Callable[[], Any],
    ) -> None:
        self.modes = modes
        self._push = push
        self._pop = pop

    def replace(self, modes: list[Any]) -> None:
        """Makes ``modes``, outermost first, those of the calling thread."""
        current = self.modes()
        if current == modes:
            return
        for _ in current:
            self._pop()
        for mode in modes:
            self._push(mode)


_MODE_STACKS = (
    _ModeStack(
        overrides._get_current_function_mode_stack,
        overrides._push_mode,
        overrides._pop_mode,
    ),
    _ModeStack(
        _python_dispatch._get_current_dispatch_mode_stack,
        _python_dispatch._push_mode,
        _python_dispatch._pop_mode,
    ),
)


def saved_tensor_hooks() -> list[Hooks]:
    """The hooks on tensors that autograd saves in the calling thread, the innermost first."""
    hooks = _take_hooks()
    _put_hooks(hooks)
    return hooks


def _take_hooks() -> list[Hooks]:
    hooks = []
    while (top := _top_hooks(False)) is not None:
        hooks.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return hooks


def _put_hooks(hooks: list[Hooks]) -> None:
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_top_hooks: Callable[[bool], Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks
