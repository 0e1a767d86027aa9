"""Two Triton kernels that nothing else has loaded."""

from __future__ import annotations

import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _add_one(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 1.0)


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _add_two(x):  # type: ignore[no-untyped-def]
    tl.store(x, tl.load(x) + 2.0)


KERNELS = (_add_one, _add_two)
