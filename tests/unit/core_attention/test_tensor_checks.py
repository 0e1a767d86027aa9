"""Tensors that would give wrong numbers are refused."""

from __future__ import annotations

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
    ("name", "tensor"),
    [
        ("q", torch.zeros(1, 5, 4, 8)),
        ("q", torch.zeros(5, 32)),
        ("q", torch.zeros(4, 5, 8)),
        ("k", torch.zeros(5, 4, 8)),
        ("v", torch.zeros(5, 2, 8)),
        ("v", torch.zeros(7, 2, 6)),
        ("k", torch.zeros(5, 2, 8).bfloat16()),
        ("v", torch.zeros(5, 2, 6, device="meta")),
        ("q", torch.zeros(5, 8, 4).transpose(1, 2)),
        ("k", torch.zeros(5, 2, 24)[..., :8]),
        ("v", torch.zeros(5, 1, 6).expand(5, 2, 6)),
        ("v", torch.zeros(1, 2, 6).expand(5, 2, 6)),
    ],
)
def test_what_does_not_fit_is_refused(name: str, tensor: torch.Tensor) -> None:
    with pytest.raises(TensorError):
        check_qkv(**(tensors() | {name: tensor}), shape=SHAPE, n_rows=5)
