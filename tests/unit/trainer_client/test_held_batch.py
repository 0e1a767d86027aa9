"""Batches that are held while their loader makes others in the same memory."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from trainer_client.loops.held_batch import own_copy


@dataclasses.dataclass(frozen=True)
class Packed:
    """As Megatron's parameters of packed sequences."""

    cu_seqlens: torch.Tensor


class Pair(NamedTuple):
    tokens: torch.Tensor
    labels: torch.Tensor


class Encoding(UserDict[str, Any]):
    """As of transformers' tokenizers."""


@pytest.mark.parametrize(
    "wrap",
    [
        lambda rows: rows,
        lambda rows: rows.numpy(),
        lambda rows: rows[None].expand(2, -1),
        lambda rows: [(rows, "text")],
        lambda rows: Pair(rows, rows),
        lambda rows: Packed(rows),
        lambda rows: Encoding({"rows": {"rows": rows}}),
    ],
    ids=["tensor", "array", "view", "list", "named tuple", "dataclass", "user dict"],
)
def test_a_copy_has_memory_of_its_own(wrap: Callable[[torch.Tensor], Any]) -> None:
    buffer = torch.zeros(4, dtype=torch.int64)
    given = wrap(buffer)
    expected = str(given)
    copied = own_copy(given)
    buffer.fill_(1)
    assert type(copied) is type(given)
    assert str(copied) == expected != str(given)
