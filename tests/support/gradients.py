"""Gradients of two modules, compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def gradients_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Whole gradients by name, without parameters that got none."""
    found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {
        name: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for name, gradient in found.items()
    }


def assert_gradients(
    module: nn.Module,
    expected: nn.Module | dict[str, torch.Tensor],
    tolerance: float,
    where: str = "",
    *,
    factor: float = 1.0,
    floor: float = 0.0,
) -> None:
    """Both have gradients of the same parameters, and they differ by ``tolerance`` at most.

    Args:
        tolerance: relative to the largest number of a gradient.
        where: in errors.
        factor: multiplies those of ``module``.
        floor: of the largest number of all gradients, which sums that cancel are compared with.
    """
    mine = gradients_of(module)
    right = gradients_of(expected) if isinstance(expected, nn.Module) else expected
    assert mine.keys() == right.keys() != set(), where
    largest = max(float(gradient.abs().max()) for gradient in right.values())
    for name, gradient in right.items():
        scale = max(float(gradient.abs().max()), floor * largest)
        difference = float((mine[name] * factor - gradient).abs().max())
        assert difference <= tolerance * scale, f"{where} {name} differs by {difference:.1e}"
