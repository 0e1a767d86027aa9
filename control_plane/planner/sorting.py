"""Stable sorting of many whole numbers, in time proportional to how many there are."""

from __future__ import annotations

import numpy as np

from control_plane.planner.compiled import compiled_inner, compiled_leaf
from core_attention.arrays import Int64Array

MOST_DIGIT_BITS = 11


@compiled_inner
def sorted_by(indices: Int64Array, key: Int64Array) -> Int64Array:
    """``indices`` in the order of ``key[indices]``, which are 0 or more, smallest first; equal ones
    keep their order. A radix sort."""
    largest = 0
    for i in indices:
        largest = max(largest, key[i])
    n_bits = 0
    while largest >> n_bits:
        n_bits += 1
    n_digits = (n_bits + MOST_DIGIT_BITS - 1) // MOST_DIGIT_BITS
    here, there = indices.copy(), np.empty_like(indices)
    if n_digits == 0:
        return here
    digit_bits = (n_bits + n_digits - 1) // n_digits
    place = np.empty(1 << digit_bits, dtype=np.int64)
    for digit in range(n_digits):
        _sort_by_digit(here, there, key, digit * digit_bits, place)
        here, there = there, here
    return here


@compiled_leaf
def _sort_by_digit(
    here: Int64Array, there: Int64Array, key: Int64Array, shift: int, place: Int64Array
) -> None:
    """Writes ``here`` to ``there`` in the order of a digit of the keys, the bits from ``shift`` on;
    ``place`` has an entry for each of its values."""
    n_values = len(place)
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
