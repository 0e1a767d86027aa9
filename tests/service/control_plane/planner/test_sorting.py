"""The stable radix sort."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner.sorting import sorted_by
from tests.service.control_plane.planner.compiled_calls import callable_from_python


@pytest.mark.parametrize("largest", [0, 1, 2**11 - 1, 2**11, 2**22 + 1, 2**33])
@pytest.mark.parametrize("n", [0, 1, 2, 300])
def test_it_sorts_as_a_stable_sort_does(n: int, largest: int) -> None:
    rng = np.random.default_rng(n)
    key = rng.integers(0, largest + 1, size=n)
    key[n // 2 :] = key[: n - n // 2]  # equal keys, whose order must stay
    indices = rng.permutation(n)
    expected = indices[np.argsort(key[indices], kind="stable")]
    assert callable_from_python(sorted_by)(indices, key).tolist() == expected.tolist()


def test_only_the_indices_that_are_given_are_sorted() -> None:
    key = np.array([5, 1, 9, 3])
    given = np.array([2, 0])
    assert callable_from_python(sorted_by)(given, key).tolist() == [0, 2]
    assert given.tolist() == [2, 0]
