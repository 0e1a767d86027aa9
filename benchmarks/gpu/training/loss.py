"""The training loss: cross entropy, summed, so that it can be normalised over all ranks.

The logits of a long batch are never whole: 128K rows of a vocabulary of 128K are 67 GB in float32.
They are made a chunk of rows at a time, together with the gradients, so nothing is computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

IGNORED_LABEL = -100
"""Marks a row that predicts nothing; cross entropy leaves it out."""

DEFAULT_CHUNK_ROWS = 8192
"""So few sums of the weight's gradient that they take 2% of the time of the matrix products; 2 GB
of bfloat16 logits for a vocabulary of 128K."""


def chunked_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk_rows: int = DEFAULT_CHUNK_ROWS,
) -> torch.Tensor:
    """Summed cross entropy of the logits ``hidden @ weight.T``, of which a chunk exists at a time.

    Args:
        hidden: ``[n_tokens, width]``.
        weight: ``[vocabulary, width]``, same dtype.
        labels: ``[n_tokens]`` next tokens; IGNORED_LABEL predicts nothing.
        chunk_rows: rows whose logits exist together.

    Returns:
        A scalar, float32. The gradient of ``weight`` is summed over the chunks in float32.
    """
    loss: torch.Tensor = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, chunk_rows
    )
    return loss


class _ChunkedLoss(torch.autograd.Function):
    """Computes the gradients in the forward pass, while the logits are there."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        labels: torch.Tensor,
        chunk_rows: int,
    ) -> torch.Tensor:
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        d_hidden = torch.empty_like(hidden)
        d_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for begin in range(0, len(hidden), chunk_rows):
            rows = slice(begin, begin + chunk_rows)
            chunk_loss, d_logits = _loss_and_gradient(hidden[rows] @ weight.t(), labels[rows])
            loss += chunk_loss
            torch.mm(d_logits, weight, out=d_hidden[rows])
            d_weight += d_logits.t() @ hidden[rows]
        ctx.save_for_backward(d_hidden, d_weight.to(weight.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        # In place: they are this operation's own, and as large as nothing else here.
        return d_hidden.mul_(gradient), d_weight.mul_(gradient), None, None


def _loss_and_gradient(
    logits: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed loss of some rows, and its gradient in the dtype of ``logits``, whose memory it may
    take."""
    if logits.device.type == "cuda":
        from benchmarks.gpu.training.gpu_loss import loss_in_place

        return loss_in_place(logits, labels, IGNORED_LABEL)
    with torch.enable_grad():
        leaf = logits.float().requires_grad_()
        loss = torch.nn.functional.cross_entropy(
            leaf, labels, ignore_index=IGNORED_LABEL, reduction="sum"
        )
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient.to(logits.dtype)
