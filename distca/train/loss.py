"""The training loss: cross entropy, summed, so that it can be normalised over all ranks."""

from __future__ import annotations

import torch
from torch.nn import functional

from distca.data.batch import IGNORED_LABEL, TokenBatch


def summed_loss(logits: torch.Tensor, batch: TokenBatch) -> torch.Tensor:
    """Sum of the cross entropy over the predicted tokens of ``batch``, in float32.

    Args:
        logits: ``[1, n_tokens, vocabulary]``.
        batch: of the same rows; its labels are the next tokens already.
    """
    return functional.cross_entropy(
        logits[0].float(), batch.labels[0], ignore_index=IGNORED_LABEL, reduction="sum"
    )
