"""Forwards of a model that leave no trace: what probes and checks run must change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever the block runs, without gradients: the model's buffers, autocast's cache and the
    random number generators stay as they are."""
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
    kept = [_Buffers(module) for module in model.modules()]
    devices = {
        tensor.device.index or 0
        for tensor in (*model.parameters(), *model.buffers())
        if tensor.device.type == "cuda"
    }
    with torch.random.fork_rng(sorted(devices), device_type="cuda"):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffers in kept:
                    buffers.restore()


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
