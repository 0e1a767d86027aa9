"""The entrance of forward passes that nobody has planned: models meet it by their hooks.

A model of transformers that is attached asks its :class:`Entrance` before and after each forward.
One that is not asks ``open_door``, which :mod:`trainer_client.attach` puts here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from torch import nn


class Entrance(Protocol):
    """Plans forward passes of a model as they come."""

    def enter(self, model: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
        """A forward of ``model`` begins, with these arguments by name; returns what it is to be
        called with."""

    def leave(self, model: nn.Module, output: Any) -> Any:
        """A forward of ``model`` is over; returns what its caller gets."""


entrances: WeakKeyDictionary[nn.Module, Entrance] = WeakKeyDictionary()

open_door: list[Callable[[nn.Module], object]] = []
"""Attaches a model at its first forward with gradients."""
