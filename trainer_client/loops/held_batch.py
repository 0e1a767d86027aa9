"""Copies of batches that are held while their loader makes others, perhaps in the same memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any, TypeVar

import numpy as np
import torch

Batch = TypeVar("Batch")


def own_copy(batch: Batch) -> Batch:
    """``batch`` with tensors and arrays of its own: itself, or what mappings, lists, tuples and
    dataclasses hold at any depth. Tensors stay on their device, pinned ones are pinned again."""
    value: Any = batch
    copied: Any = value
    if isinstance(value, torch.Tensor):
        pinned = value.is_pinned()
        copied = torch.empty_like(value, pin_memory=True).copy_(value) if pinned else value.clone()
    elif isinstance(value, np.ndarray):
        copied = value.copy()
    elif isinstance(value, MutableMapping):
        copied = copy.copy(value)
        for name in value:
            copied[name] = own_copy(value[name])
    elif isinstance(value, list | tuple):
        items = [own_copy(item) for item in value]
        copied = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(copied, field.name, own_copy(getattr(value, field.name)))
    return copied  # type: ignore[no-any-return]
