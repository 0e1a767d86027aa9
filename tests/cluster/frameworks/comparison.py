"""Losses and gradients of a step, served and by float64 attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch


def assert_same(
    found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor], *where: object
) -> None:
    """Compares a step's loss and all gradients, element by element.

    Args:
        found: by name; models that compute in float32.
        right: likewise.
        where: names the step in errors.
    """
    assert found.keys() == right.keys(), where
    assert any(bool(value.any()) for value in right.values()), where
    for name, value in found.items():
        # float32 sums of some hundred terms, in another order.
        torch.testing.assert_close(
            value,
            right[name],
            rtol=2e-4,
            atol=2e-5 * float(right[name].abs().max()),
            check_dtype=False,
            msg=partial(str.__add__, f"{(*where, name)}: "),
        )
