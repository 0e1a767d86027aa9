"""A layer of a small model, for tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from core_attention.shape import AttentionShape
from trainer_client import core_attention

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""O of packed rows of Q, K and V."""


class Block(nn.Module):
    """Attention with a norm before and a residual around it; as wide as its heads together."""

    def __init__(self, shape: AttentionShape) -> None:
        super().__init__()
        self._shape = shape
        width = shape.num_heads * shape.head_dim
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(width, width)
        self.qkv = nn.Linear(width, width + 2 * shape.num_heads_kv * shape.head_dim)

    def forward(self, hidden: torch.Tensor, attend: Attend = core_attention) -> torch.Tensor:
        shape = self._shape
        heads = self.qkv(self.norm(hidden.flatten(0, -2))).unflatten(-1, (-1, shape.head_dim))
        parts = heads.split([shape.num_heads, shape.num_heads_kv, shape.num_heads_kv], dim=1)
        q, k, v = (part.contiguous() for part in parts)
        attended: torch.Tensor = self.out(attend(q, k, v).flatten(1))
        return hidden + attended.view_as(hidden)
