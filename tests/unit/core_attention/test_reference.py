"""The reference itself, against PyTorch's float64 attention and against finite differences."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.support.reference import reference_attention


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_agrees_with_pytorch_document_by_document() -> None:
    lengths = [1, 5, 30]
    q, k, v = normal(36, 4, 8), normal(36, 2, 8), normal(36, 2, 6)
    result = reference_attention(q, k, v, lengths, 0.3)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        qd, kd, vd = (x[rows].transpose(0, 1)[None] for x in (q, k, v))
        expected = scaled_dot_product_attention(
            qd, kd, vd, is_causal=True, scale=0.3, enable_gqa=True
        )
        # Both are float64: a few roundings of values near 1.
        torch.testing.assert_close(result.o[rows], expected[0].transpose(0, 1), rtol=0, atol=1e-13)
        begin += length
    first = 0.3 * (q[0].view(2, 2, 8) * k[0][:, None]).sum(-1).flatten()
    torch.testing.assert_close(result.lse[0], first)


def test_gradients_are_those_of_finite_differences() -> None:
    q, k, v, do = normal(5, 2, 3), normal(5, 1, 3), normal(5, 1, 4), normal(5, 2, 4)
    result = reference_attention(q, k, v, [2, 3], 0.7, do)
    step = 1e-6
    for tensor, gradient in ((q, result.dq), (k, result.dk), (v, result.dv)):
        assert gradient is not None
        flat = tensor.view(-1)
        for i in range(flat.numel()):
            losses = []
            for sign in (1, -1):
                flat[i] += sign * step
                losses.append((reference_attention(q, k, v, [2, 3], 0.7).o * do).sum())
                flat[i] -= sign * step
            # Central differences: an error of step^2, and 1e-16 / step of rounding.
            difference = (losses[0] - losses[1]) / (2 * step)
            assert float(difference) == pytest.approx(float(gradient.view(-1)[i]), abs=1e-8)
