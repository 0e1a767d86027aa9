"""Triton kernels around FlashAttention's backward pass."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from core_attention.kernels.gpu_launches import SUM_ROWS, GradientSum

MAX_SUM_COLUMNS = 1024
SURROGATE_ROWS = 16
SURROGATE_TERMS = 3
"""Each term leaves a rounding error of the dtype of the term before: 2**-9 of it for bfloat16."""


def add_task_gradients(target: torch.Tensor, source: torch.Tensor, sums: GradientSum) -> None:
    """Adds the tasks' gradients to a part's, in float32 and in task order.

    Args:
        target: ``[n_dk, num_heads_kv, dim]`` float32; each row contiguous.
        source: ``[rows of all tasks, num_heads_kv, dim]`` any dtype, contiguous.
        sums: which rows add up to which.
    """
    width = target.shape[1] * target.shape[2]
    # By the whole row, so that a group of heads is summed by the same kernel.
    columns = min(MAX_SUM_COLUMNS, triton.next_power_of_2(target.stride(0)))
    grid = (len(sums.blocks), triton.cdiv(width, columns))
    _add_task_gradients[grid](
        target,
        source,
        sums.blocks,
        sums.shifts,
        width,
        target.stride(0),
        block_rows=SUM_ROWS,
        block_columns=columns,
        num_warps=8,
    )


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _add_task_gradients(  # type: ignore[no-untyped-def]
    target,
    source,
    blocks,
    shifts,
    width,
    target_stride,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
):
    block = blocks + 4 * tl.program_id(0)
    first_row, n_rows = tl.load(block), tl.load(block + 1)
    begin, end = tl.load(block + 2), tl.load(block + 3)
    in_block = tl.arange(0, block_rows)
    columns = tl.program_id(1) * block_columns + tl.arange(0, block_columns)
    inside = (in_block < n_rows)[:, None] & (columns < width)[None, :]
    rows = (first_row + in_block).to(tl.int64)[:, None]
    at = target + rows * target_stride + columns[None, :]
    total = tl.load(at, mask=inside, other=0.0)
    for task in range(begin, end):
        task_rows = rows + tl.load(shifts + task)
        term = tl.load(source + task_rows * width + columns[None, :], mask=inside, other=0.0)
        total += term.to(tl.float32)
    tl.store(at, total, mask=inside)


def surrogate_output(do: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """A tensor o' with ``sum(do * o', -1) == delta``, for kernels that compute delta from o.

    A row of o' is zero but for SURROGATE_TERMS places, those of the largest ``|do|``: the first
    takes delta / do, rounded to the dtype, the next what that rounding left, and so on. Products of
    two such numbers are exact in float32, so delta comes out to float32 rounding, which is better
    than from the true o rounded to the dtype.

    Args:
        do: ``[n_q, num_heads, dim]`` contiguous.
        delta: ``[n_q, num_heads]`` float32, contiguous.
    """
    surrogate = torch.empty_like(do)
    dim, n_rows = do.shape[-1], delta.numel()
    _surrogate_output[(triton.cdiv(n_rows, SURROGATE_ROWS),)](
        do,
        delta,
        surrogate,
        n_rows,
        dim,
        block_rows=SURROGATE_ROWS,
        block_columns=triton.next_power_of_2(dim),
        n_terms=SURROGATE_TERMS,
    )
    return surrogate


@triton.jit(do_not_specialize=["n_rows"])  # type: ignore[misc,untyped-decorator,unused-ignore]
def _surrogate_output(  # type: ignore[no-untyped-def]
    do_pointer,
    delta_pointer,
    surrogate_pointer,
    n_rows,
    dim,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    n_terms: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, block_columns)
    inside = (rows < n_rows)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    do = tl.load(do_pointer + at, mask=inside, other=0.0).to(tl.float32)
    left = tl.load(delta_pointer + rows, mask=rows < n_rows, other=0.0)
    size = tl.where(inside, tl.abs(do), -1.0)
    surrogate = tl.zeros((block_rows, block_columns), tl.float32)
    for _ in tl.static_range(n_terms):
        chosen = columns[None, :] == tl.argmax(size, axis=1)[:, None]
        factor = tl.sum(tl.where(chosen, do, 0.0), axis=1)
        term = tl.where(factor == 0.0, 0.0, left / tl.where(factor == 0.0, 1.0, factor))
        term = term.to(surrogate_pointer.dtype.element_ty).to(tl.float32)
        left -= term * factor
        surrogate = tl.where(chosen, term[:, None], surrogate)
        size = tl.where(chosen, -1.0, size)
    tl.store(surrogate_pointer + at, surrogate, mask=inside)
