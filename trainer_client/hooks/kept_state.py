"""The state of a model, kept around forwards that must change nothing, such as checks."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
"""Attributes that every module has: parameters, buffers, hooks and children."""


_CONTAINERS = (list, dict, set, OrderedDict, defaultdict, Counter, deque)
"""Those that get their items back; subclasses may have rules of their own."""


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever the block runs, without gradients: the model's buffers and what modules keep on
    themselves, autocast's cache and the random number generators, also Python's and NumPy's, stay
    as they are."""
    caches = torch.is_autocast_cache_enabled()
    with state_kept(model), torch.no_grad():
        # Weights that are cast here have no graph; kept, they would get no gradients later.
        torch.set_autocast_cache_enabled(False)
        try:
            yield
        finally:
            torch.set_autocast_cache_enabled(caches)


@contextmanager
def state_kept(model: nn.Module) -> Iterator[None]:
    """The same with gradients, whose backward is in the block too: layers that are recomputed there
    write their buffers once more."""
    kept = [made(module) for module in model.modules() for made in (_Buffers, _Attributes)]
    devices = {
        tensor.device.index or 0
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cuda"
    }
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(sorted(devices), device_type="cuda"):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)
            with torch.no_grad():
                for each in kept:
                    each.restore()


class _Buffers:
    """A module's own buffers, to be put back: rotary embeddings, for one, may change theirs."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._all = dict(module._buffers)
        self._values = [
            (buffer, buffer._version, buffer.clone())
            for buffer in self._all.values()
            if buffer is not None
        ]

    def restore(self) -> None:
        self._module._buffers.clear()
        self._module._buffers.update(self._all)
        for buffer, version, values in self._values:
            # A graph of the caller's that saved the buffer must find it unwritten.
            if buffer._version != version:
                buffer.copy_(values)


class _Attributes:
    """Attributes of a module, to be put back: losses that hooks collect, counters, caches.
    Items of containers too, but not what these are made of.

    Not that of a module that builds itself in its first pass: it would build itself again, beside
    the parameters, children and hooks that it has. Nor of DistributedDataParallel, whose attributes
    follow those of an object that goes on.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._built = _built(module)
        self._values = {
            name: value for name, value in module.__dict__.items() if name not in OF_MODULES
        }
        self._items = [
            (value, value.copy()) for value in self._values.values() if type(value) in _CONTAINERS
        ]

    def restore(self) -> None:
        if isinstance(self._module, DistributedDataParallel) or _differ(
            self._built, _built(self._module)
        ):
            return
        held = self._module.__dict__
        for name in [name for name in held if name not in OF_MODULES]:
            if name not in self._values:
                del held[name]
        held.update(self._values)
        for container, items in self._items:
            container.clear()
            is_sequence = isinstance(container, list | deque)
            (container.extend if is_sequence else container.update)(items)


def _built(module: nn.Module) -> dict[tuple[str, Any], Any]:
    """A module's class, parameters, children and hooks."""
    return {("", ""): type(module)} | {
        (name, key): value
        for name, held in module.__dict__.items()
        if name in OF_MODULES and name != "_buffers" and isinstance(held, dict)
        for key, value in held.items()
    }


def _differ(before: dict[Any, Any], after: dict[Any, Any]) -> bool:
    return before.keys() != after.keys() or any(
        value is not after[key] for key, value in before.items()
    )
