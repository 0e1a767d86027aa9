"""Stable sorting of many whole numbers, in time proportional to how many there are."""

from __future__ import annotations

import numpy as np

from control_plane.planner.compiled import compiled_inner
from core_attention.arrays import Int64Array

DIGIT_BITS = 11


@compiled_inner
def sorted_by(indices: Int64Array, key: Int64Array) -> Int64Array:
    """``indices`` in the order of ``key[indices]``, which are 0 or more, smallest first; equal ones
    keep their order. A radix sort."""
    n_values = 1 << DIGIT_BITS
    largest = 0
    for i in indices:
        largest = max(largest, key[i])
    here, there = indices.copy(), np.empty_like(indices)
    place = np.empty(n_values, dtype=np.int64)
    shift = 0
    while largest >> shift:
        place[:] = 0
        for i in here:
            place[(key[i] >> shift) & (n_values - 1)] += 1
        total = 0
        for value in range(n_values):
            count = place[value]
            place[value] = total
            total += count
        for i in here:
            value = (key[i] >> shift) & (n_values - 1)
            there[place[value]] = i
            place[value] += 1
        here, there = there, here
        shift += DIGIT_BITS
    return here
