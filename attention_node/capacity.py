"""How much work fits the memory for messages, as the planner counts it: in rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from core_attention.shape import AttentionShape

LANES = 2
"""Nano-batches whose ticks are on a server at a time: ping-pong."""

POOL_ROUNDING = 1.25
"""A buffer takes up to so much more than its message; see ``data_plane.buffer_pool``."""


def rows_within(limit_bytes: int, shapes: Sequence[AttentionShape]) -> int:
    """The rows of Q plus K/V that a tick may have for the messages of one tick of each lane to fit
    ``limit_bytes``, whatever they are rows of, for the largest of ``shapes``.
    """
    row_bytes = max(map(_largest_row_bytes, shapes))
    rows = int(limit_bytes / (LANES * POOL_ROUNDING * row_bytes))
    if rows < 1:
        least = math.ceil(LANES * POOL_ROUNDING * row_bytes)
        raise ValueError(
            f"buffer_limit_bytes is {limit_bytes}; one row of a tick takes {row_bytes} bytes, and "
            f"{LANES} lanes need room: give {least} or more (--buffer-limit-mib "
            f"{math.ceil(least / 2**20)})"
        )
    return rows


def _largest_row_bytes(shape: AttentionShape) -> int:
    """The bytes of one row in the backward pass, request and reply together."""
    query = 2 * shape.q_row_bytes + shape.o_row_bytes + 2 * shape.lse_row_bytes
    return max(query, 2 * shape.kv_row_bytes)
