"""Triton kernel of :func:`core_attention.kernels.row_dots.row_dots`."""

from __future__ import annotations

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

BLOCK_ROWS = 32


def launch_row_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """See ``row_dots``."""
    dots = torch.empty(a.shape[:-1], dtype=torch.float32, device=a.device)
    dim, n_rows = a.shape[-1], dots.numel()
    if n_rows:
        with torch.cuda.device(a.device):
            _row_dots[(triton.cdiv(n_rows, BLOCK_ROWS),)](
                a,
                b,
                dots,
                n_rows,
                dim,
                block_rows=BLOCK_ROWS,
                block_columns=triton.next_power_of_2(dim),
            )
    return dots


@triton.jit(do_not_specialize=["n_rows"])  # type: ignore[misc,untyped-decorator,unused-ignore]
def _row_dots(  # type: ignore[no-untyped-def]
    a, b, dots, n_rows, dim, block_rows: tl.constexpr, block_columns: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    columns = tl.arange(0, block_columns)
    inside = (rows < n_rows)[:, None] & (columns < dim)[None, :]
    at = rows[:, None] * dim + columns[None, :]
    left = tl.load(a + at, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(b + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(dots + rows, tl.sum(left * right, axis=1), mask=rows < n_rows)
