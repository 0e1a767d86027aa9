"""The chunked loss equals plain cross entropy, and so do its gradients."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu.training.loss import IGNORED_LABEL, chunked_loss

VOCABULARY, WIDTH = 50, 16


def example(
    n_rows: int, dtype: torch.dtype, device: str = "cpu", vocabulary: int = VOCABULARY
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weight and labels, of which every fifth is ignored."""
    generator = torch.Generator().manual_seed(n_rows)
    hidden = torch.randn(n_rows, WIDTH, generator=generator).to(device, dtype)
    weight = torch.randn(vocabulary, WIDTH, generator=generator).to(device, dtype)
    labels = torch.randint(0, vocabulary, (n_rows,), generator=generator)
    labels[::5] = IGNORED_LABEL
    return hidden.requires_grad_(), weight.requires_grad_(), labels.to(device)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients of whole logits in float64; the loss counts threefold."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(
        hidden @ weight.t(), labels, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    (3 * loss).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def relative(found: torch.Tensor | None, expected: torch.Tensor) -> float:
    assert found is not None
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("n_rows", "chunk_rows"), [(37, 8), (40, 8), (5, 100), (1, 1)])
def test_chunked_loss_and_gradients_equal_those_of_whole_logits(
    n_rows: int, chunk_rows: int
) -> None:
    hidden, weight, labels = example(n_rows, torch.float32)
    if n_rows == 1:
        labels[0] = 3
    loss = chunked_loss(hidden, weight, labels, chunk_rows)
    (3 * loss).backward()
    expected, d_hidden, d_weight = plain(hidden, weight, labels)
    # float32: a few dozen roundings of 6e-8.
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert relative(hidden.grad, d_hidden) < 1e-5
    assert relative(weight.grad, d_weight) < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_fused_loss_on_a_gpu_equals_float64() -> None:
    hidden, weight, labels = example(1000, torch.bfloat16, "cuda", vocabulary=20011)
    loss = chunked_loss(hidden, weight, labels, 256)
    (3 * loss).backward()
    expected, d_hidden, d_weight = plain(hidden, weight, labels)
    # bfloat16 logits: 2^-9 = 2e-3 a rounding, which the loss of many rows averages out.
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-3)
    assert relative(hidden.grad, d_hidden) < 1e-2
    assert relative(weight.grad, d_weight) < 1e-2
