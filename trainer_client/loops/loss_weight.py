"""Losses that are means over tokens, whatever ranks and nano-batches hold how many."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist

IGNORED = -100
"""Labels that no loss is computed for."""


def labels_per_rank(
    batches: Iterable[Mapping[str, Any]],
    *,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """The divisor that makes the sum of a rank's losses its part of the mean over all tokens.

    DDP and FSDP average gradients over ranks, so it is the number of labels on all ranks, divided
    by the number of ranks. Models of transformers take it as ``num_items_in_batch``. A collective,
    if there are several ranks: all call it once a step.

    Args:
        batches: of this rank in the step, each with ``labels`` whose last dimension is the rows;
            the first of them is no target, nor is any that is -100.
        device: of the result, and of the collective; None: that of the labels.
        group: of the ranks; None is the default group.

    Returns:
        A scalar, float32, at least 1 / ranks.
    """
    labels = [batch["labels"][..., 1:] for batch in batches]
    counts = [(each != IGNORED).sum() for each in labels]
    if device is None:
        device = labels[0].device if labels else torch.device("cpu")
    total = torch.zeros((), dtype=torch.int64, device=device)
    for count in counts:
        total += count.to(device)
    n_ranks = 1
    if dist.is_available() and dist.is_initialized():
        n_ranks = dist.get_world_size(group)
        dist.all_reduce(total, group=group)
    # A step without a label has a loss of zero, not of 0 / 0.
    return total.clamp(min=1) / n_ranks
