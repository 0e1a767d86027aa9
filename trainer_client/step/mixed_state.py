"""Finds what modules leave on themselves for a later part of their own pass, where nano-batches
that take turns mix it: a list that each pass begins, the last output, a switch that is set.

Looked at in the first pass in which a model's nano-batches take turns: after each turn its modules'
attributes are compared with those after the turn before.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer_client.hooks.kept_state import OF_MODULES

logger = logging.getLogger(__name__)

_CONTAINERS = (list, dict, set, deque)
_LOOKED_AT = (bool, torch.Tensor, *_CONTAINERS)
_MOST_NAMED = 4

_looked_at: weakref.WeakSet[nn.Module] = weakref.WeakSet()

_Place = tuple[str, str]
"""A module's name, and an attribute's."""


@dataclass
class _KeptValue:
    """The value of an attribute after a turn.

    Attributes:
        value: the tensor or container itself.
        n: items of a container.
        writers: the nano-batches that wrote to it.
    """

    value: Any
    n: int
    writers: set[int]


class MixedState:
    """Watches one pass of several nano-batches.

    Args:
        model: what they run.
        n: how many nano-batches there are.
    """

    def __init__(self, model: nn.Module, n: int) -> None:
        self._model = model
        self._modules = list(model.named_modules())
        self._gave_way: set[int] = set()
        self._running = set(range(n))
        self._before = {place: (value, _n_items(value)) for place, value in self._attributes()}
        self._kept: dict[_Place, _KeptValue] = {}
        self._lost: set[_Place] = set()
        self._switched: set[_Place] = set()

    def turn_ended(self, nano_batch: int, *, is_over: bool) -> None:
        """``nano_batch`` has given way, or its pass is over."""
        if self._running == {nano_batch}:
            # The others' passes are over: nobody is left to mix anything with.
            return
        if not is_over:
            self._gave_way.add(nano_batch)
        for place, value in self._attributes():
            before, n_before = self._before.get(place, (None, 0))
            if isinstance(value, bool):
                if not is_over and isinstance(before, bool) and value is not before:
                    self._switched.add(place)
            elif place in self._kept:
                self._compare(place, value, nano_batch)
            elif value is not before or _n_items(value) != n_before:
                self._kept[place] = _KeptValue(value, _n_items(value), {nano_batch})
        if is_over:
            self._running.discard(nano_batch)

    def _compare(self, place: _Place, value: Any, nano_batch: int) -> None:
        kept, n = self._kept[place], _n_items(value)
        if value is kept.value and n >= kept.n:
            if n > kept.n:
                kept.writers.add(nano_batch)
            kept.n = n
            return
        # What another one has written, and may yet want to read, is gone.
        if (kept.writers - {nano_batch}) & self._running:
            self._lost.add(place)
        self._kept[place] = _KeptValue(value, n, {nano_batch})

    def found(self) -> list[str]:
        """The attributes that are mixed, by name."""
        after = dict(self._attributes())
        switched = {at for at in self._switched if after.get(at) is self._before[at][0]}
        return [".".join(filter(None, place)) for place in sorted(self._lost | switched)]

    def end(self) -> None:
        """The pass is over: logs what was found, and has the model not watched again if there was
        anything to see."""
        if len(self._gave_way) > 1:
            _looked_at.add(self._model)
        found = self.found()
        if not found:
            return
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        logger.warning(
            "%s keeps %s%s on its modules during a pass, where the other nano-batch, which takes "
            "turns with it, changes them: what is read later in the pass may be the other's. "
            "Return such values, keep them by nano-batch, or attach the model with turns=1",
            type(self._model).__name__,
            ", ".join(found[:_MOST_NAMED]),
            more,
        )

    def _attributes(self) -> Iterator[tuple[_Place, Any]]:
        """Switches, tensors and containers."""
        for name, module in self._modules:
            for attribute, value in module.__dict__.items():
                if (
                    attribute not in OF_MODULES
                    and isinstance(value, _LOOKED_AT)
                    and not _is_derived(module, attribute)
                ):
                    yield (name, attribute), value


def _is_derived(module: nn.Module, attribute: str) -> bool:
    """Return whether a hook makes it of parameters before each forward, as ``weight_norm``,
    ``spectral_norm`` and ``prune`` of torch.nn.utils do with weights."""
    return f"{attribute}_orig" in module._parameters or f"{attribute}_v" in module._parameters


def _n_items(value: Any) -> int:
    return len(value) if isinstance(value, _CONTAINERS) else 0


def watch(model: nn.Module | None, n: int) -> MixedState | None:
    """The watch on the pass of ``n`` nano-batches that begins; None if there is nothing to see, or
    one of ``model`` was watched before."""
    if model is None or n < 2 or model in _looked_at:
        return None
    return MixedState(model, n)
