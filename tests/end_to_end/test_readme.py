"""The README's example of a trainer of one's own runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core_attention.shape import AttentionShape
from distca.train.ranks import RankEnvironment, process_group
from tests.cluster import ROOT, Cluster

N_STEPS = 3


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    """Documents of these lengths in one row; each document's first token is not predicted."""
    ids = torch.randint(0, 64, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": labels}


@pytest.mark.slow
def test_example_of_a_trainer_of_ones_own_trains(tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    built: list[Any] = []

    class Recording:
        """Keeps the model that the example builds, and gives it an optimiser."""

        @staticmethod
        def from_config(*args: Any, **kwargs: Any) -> Any:
            auto: Any = AutoModelForCausalLM  # from_config has no annotations
            model = auto.from_config(*args, **kwargs)
            built.append(torch.optim.SGD(model.parameters(), lr=0.1))
            return model

    class Optimizer:
        def step(self) -> None:
            built[0].step()

        def zero_grad(self) -> None:
            built[0].zero_grad()

    losses: list[float] = []

    def loader() -> Any:
        for _ in range(N_STEPS):
            yield [batch([5, 1, 10]), batch([16])]

    cluster = Cluster(tmp_path)
    try:
        ranks = RankEnvironment(rank=0, n_ranks=1, init_method=f"file://{tmp_path / 'store'}")
        with process_group(ranks, timeout_seconds=60.0):
            names: dict[str, Any] = {
                "AutoModelForCausalLM": Recording,
                "DistributedDataParallel": torch.nn.parallel.DistributedDataParallel,
                "config": config,
                "rank": 0,
                "n_ranks": 1,
                "shape": AttentionShape(
                    num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=8, dtype="float32"
                ),
                "loader": loader(),
                "optimizer": Optimizer(),
                "sum": lambda values: _recorded(torch.stack([*values]).sum(), losses),
            }
            exec(example.replace("control-plane:7700", cluster.address), names)
    finally:
        cluster.close()
    assert len(losses) == N_STEPS
    assert losses[-1] < losses[0]


def _recorded(loss: torch.Tensor, losses: list[float]) -> torch.Tensor:
    losses.append(float(loss.detach()))
    return loss
