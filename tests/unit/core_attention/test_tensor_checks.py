"""Tensors that would give wrong numbers are refused, with what to do about it."""

from __future__ import annotations

import re

import pytest
import torch

from core_attention.errors import TensorError
from core_attention.shape import AttentionShape
from core_attention.tensor_checks import check_qkv

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=6, dtype="float32")


def tensors() -> dict[str, torch.Tensor]:
    return {"q": torch.zeros(5, 4, 8), "k": torch.zeros(5, 2, 8), "v": torch.zeros(5, 2, 6)}


def test_accepts_what_is_right_also_without_rows() -> None:
    check_qkv(**tensors(), shape=SHAPE, n_rows=5)
    check_qkv(**{name: t[:0] for name, t in tensors().items()}, shape=SHAPE, n_rows=0)
    check_qkv(**{name: t[1:4] for name, t in tensors().items()}, shape=SHAPE, n_rows=3)


@pytest.mark.parametrize(
    ("name", "tensor", "remedy"),
    [
        ("q", torch.zeros(1, 5, 4, 8), "flatten(0, 1)"),
        ("q", torch.zeros(5, 32), "(5, 4, 8)"),
        ("q", torch.zeros(4, 5, 8), "transpose(0, 1)"),
        ("k", torch.zeros(5, 4, 8), "(2, 8)"),
        ("v", torch.zeros(5, 2, 8), "(2, 6)"),
        ("v", torch.zeros(7, 2, 6), "7 rows"),
        ("k", torch.zeros(5, 2, 8).bfloat16(), ".to(torch.float32)"),
        ("v", torch.zeros(5, 2, 6, device="meta"), ".to('cpu')"),
        ("q", torch.zeros(5, 8, 4).transpose(1, 2), "q.contiguous()"),
        ("k", torch.zeros(5, 2, 24)[..., :8], "k.contiguous()"),
        ("v", torch.zeros(5, 1, 6).expand(5, 2, 6), "v.contiguous()"),
        ("v", torch.zeros(1, 2, 6).expand(5, 2, 6), "v.contiguous()"),
    ],
)
def test_names_the_argument_and_what_to_do(name: str, tensor: torch.Tensor, remedy: str) -> None:
    with pytest.raises(TensorError, match=f"^{name} .*{re.escape(remedy)}"):
        check_qkv(**(tensors() | {name: tensor}), shape=SHAPE, n_rows=5)
