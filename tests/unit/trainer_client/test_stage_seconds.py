"""The timing of stages leaves a model as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer_client import measure_stages


class Counting(nn.Module):
    """Counts its tokens as layers of experts do, and drops some of what it computes."""

    tokens_seen: torch.Tensor

    def __init__(self, *, is_recomputed: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.is_recomputed = is_recomputed
        self.register_buffer("tokens_seen", torch.zeros(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.is_recomputed:
            return self.run(hidden)
        found: torch.Tensor = checkpoint(self.run, hidden, use_reentrant=False)
        return found

    def run(self, hidden: torch.Tensor) -> torch.Tensor:
        self.tokens_seen += len(hidden)
        return nn.functional.dropout(self.linear(hidden), 0.5)


@pytest.mark.parametrize("is_recomputed", [False, True])
def test_timing_leaves_no_trace(is_recomputed: bool) -> None:
    module = Counting(is_recomputed=is_recomputed)
    module.linear.weight.grad = torch.ones(4, 4)
    module(torch.zeros(3, 4))
    random = torch.get_rng_state()
    given = torch.zeros(5, 4, requires_grad=True)
    seconds = measure_stages({0: (module, lambda: module(given))}, 1, 5)
    assert min(*seconds.forward_seconds, *seconds.backward_seconds) > 0
    assert module.tokens_seen == 3
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(module.linear.weight.grad, torch.ones(4, 4))
    assert module.linear.bias.grad is None
