"""Triton kernel of the chunked loss: the logits of some rows become their gradient, in place."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

BLOCK_COLUMNS = 8192


def loss_in_place(
    logits: torch.Tensor, labels: torch.Tensor, ignored: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed cross entropy of some rows, and its gradient, which overwrites ``logits``.

    Args:
        logits: ``[rows, vocabulary]`` contiguous.
        labels: ``[rows]`` int64.
        ignored: a label that does not count.
    """
    losses = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    if len(logits):
        with torch.cuda.device(logits.device):
            _loss_in_place[(len(logits),)](
                logits,
                labels,
                losses,
                logits.shape[1],
                ignored,
                block_columns=BLOCK_COLUMNS,
                num_warps=16,
            )
    return losses.sum(), logits


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _loss_in_place(  # type: ignore[no-untyped-def]
    logits, labels, losses, n_columns, ignored, block_columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    line = logits + row * n_columns
    columns = tl.arange(0, block_columns)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for begin in range(0, n_columns, block_columns):
        inside = begin + columns < n_columns
        block = tl.load(line + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(largest, tl.max(block, axis=0))
        total = total * tl.exp(largest - larger) + tl.sum(tl.exp(block - larger), axis=0)
        largest = larger
    lse = largest + tl.log(total)
    counts = label != ignored
    own = tl.load(line + tl.where(counts, label, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(counts, lse - own, 0.0))
    for begin in range(0, n_columns, block_columns):
        inside = begin + columns < n_columns
        block = tl.load(line + begin + columns, mask=inside, other=float("-inf")).to(tl.float32)
        gradient = tl.exp(block - lse) - tl.where(begin + columns == label, 1.0, 0.0)
        gradient = tl.where(counts, gradient, 0.0)
        tl.store(line + begin + columns, gradient.to(logits.dtype.element_ty), mask=inside)
