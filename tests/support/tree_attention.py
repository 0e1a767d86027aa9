"""Core attention of documents that begin on others' paths, as an attention function of
transformers: each document's keys are gathered, and its softmax is that of the definition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

REFERENCE = "tree_reference"
"""Its ``attn_implementation``."""


def paths(lengths: list[int], parents: list[int], offsets: list[int]) -> list[torch.Tensor]:
    """The rows of each document's path, its own last."""
    found: list[torch.Tensor] = []
    row = 0
    for length, parent, offset in zip(lengths, parents, offsets, strict=True):
        shared = found[parent][:offset] if parent >= 0 else torch.arange(0)
        assert len(shared) == offset
        found.append(torch.cat([shared, torch.arange(row, row + length)]))
        row += length
    return found


def tree_reference(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention in float64 of ``[1, heads, rows, head_dim]``, as transformers calls it."""
    q, k, v = (each[0].double() for each in (query, key, value))
    k, v = (each.repeat_interleave(len(q) // len(k), dim=0) for each in (k, v))
    columns = [kwargs[f"document_{name}"].tolist() for name in ("lengths", "parents", "offsets")]
    outputs = []
    for length, path in zip(columns[0], paths(*columns), strict=True):
        scores = scaling * q[:, path[-length:]] @ k[:, path].transpose(1, 2)
        own = torch.arange(len(path) - length, len(path))
        later = torch.arange(len(path)) > own[:, None]
        outputs.append(scores.masked_fill(later, float("-inf")).softmax(-1) @ v[:, path])
    return torch.cat(outputs, dim=1).transpose(0, 1)[None].to(query.dtype), None


AttentionInterface.register(REFERENCE, tree_reference)
