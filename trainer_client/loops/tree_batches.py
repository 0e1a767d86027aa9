"""Batches as frameworks of reinforcement learning have them, packed as trees and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn.functional import pad

from core_attention.host_copies import on_device, on_host
from trainer_client.loops.tree import Tree, pack_tree

Restore = Callable[[Sequence[torch.Tensor]], torch.Tensor]
"""Gives what a tree has of each sample's tokens the shape of the batch."""


def pack_padded_tree(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, n_completion: int
) -> tuple[Tree, Restore]:
    """Pack prompts and completions with padding, as TRL has them: ``prompt_ids`` padded on the left
    and ``completion_ids`` on the right, side by side.

    Args:
        input_ids: ``[batch, tokens]``.
        attention_mask: ``[batch, tokens]``, 0 where padding is.
        n_completion: columns of completions, whose tokens are scored.

    Returns:
        The tree, and what makes ``[batch, n_completion]`` of its log-probabilities or entropies, 0
        where padding is.
    """
    mask = on_host(attention_mask).bool()
    samples = [row[kept] for row, kept in zip(on_host(input_ids), mask, strict=True)]
    prompts = mask[:, : mask.shape[1] - n_completion].sum(1).tolist()
    # Nothing predicts a first token.
    scored = (mask & (mask.cumsum(1) > 1))[:, mask.shape[1] - n_completion :]

    def padded(values: Sequence[torch.Tensor]) -> torch.Tensor:
        flat = torch.cat(list(values))
        return flat.new_zeros(scored.shape).masked_scatter(on_device(scored, flat.device), flat)

    return pack_tree(samples, prompt_lengths=prompts, device=input_ids.device), padded


def pack_nested_tree(
    input_ids: torch.Tensor, prompt_lengths: Sequence[int] | None = None
) -> tuple[Tree, Restore]:
    """Pack samples without padding, as verl's engines have them.

    Args:
        input_ids: nested ``[batch, (tokens)]``, jagged.
        prompt_lengths: tokens of each that are not scored; None: the first is not.

    Returns:
        The tree, and what makes a nested tensor like ``input_ids`` of its log-probabilities or
        entropies: each stands where the token before is, as verl has them; others are 0.
    """
    samples, untyped = list(input_ids.unbind()), cast(Any, input_ids)
    firsts = [max(first, 1) for first in prompt_lengths or [1] * len(samples)]

    def nested(values: Sequence[torch.Tensor]) -> torch.Tensor:
        shifted = [pad(each, (first - 1, 1)) for each, first in zip(values, firsts, strict=True)]
        return torch.nested.nested_tensor_from_jagged(torch.cat(shifted), untyped.offsets())

    return pack_tree(samples, prompt_lengths=firsts, device=input_ids.device), nested
