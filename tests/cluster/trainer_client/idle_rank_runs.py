"""Two ranks under DistributedDataParallel or FSDP2, of which one has no rows; run by torchrun.

``python -m torch.distributed.run ... idle_rank_runs.py CONTROL_PLANE FOLDER``: every rank compares
the gradients of each step with those of the same model with local attention on the rows of both.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import trainer_client.models.transformers  # noqa: F401  # registers the implementation
from core_attention.manifest import RankManifest
from distca.apps.train.sharding import whole
from tests.cluster.trainer_client.test_transformers import SIZES
from tests.support.cluster import on_this_host
from trainer_client import Session, SessionOptions, prepare_fsdp
from trainer_client.step.ping_pong import PingPong

DEEP = {**SIZES, "num_hidden_layers": 5}
"""So many that FSDP2 gathers weights of one layer after it has reduced gradients of another."""
Lengths = tuple[list[int], list[int]]
STEPS: tuple[tuple[Lengths, Lengths], ...] = (
    (([5, 1, 30], [17]), ([], [])),
    (([], []), ([], [9, 1])),
    (([3], []), ([21, 4], [1])),
)
"""By step and rank, documents of both nano-batches."""


class Towers(nn.Module):
    """Two models on the same rows."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = transformers.LlamaConfig(**DEEP)
        self.towers = nn.ModuleList(causal(config, implementation) for _ in range(2))

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        one, other = (tower(**batch).logits for tower in self.towers)
        return torch.as_tensor(one * other)


class Experts(nn.Module):
    """A mixture of experts, of which some get no token of a few."""

    def __init__(self, implementation: str) -> None:
        super().__init__()
        config = transformers.MixtralConfig(
            **DEEP, num_local_experts=8, num_experts_per_tok=1, sliding_window=None
        )
        self.model = causal(config, implementation)

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.model(**batch).logits)


def causal(config: Any, implementation: str) -> Any:
    untyped: Any = transformers.AutoModelForCausalLM
    return untyped.from_config(config, attn_implementation=implementation)


def batch_of(lengths: list[int], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    positions = [torch.arange(length) for length in lengths] or [torch.arange(0)]
    return {
        "input_ids": torch.randint(0, 64, (1, sum(lengths)), generator=generator),
        "position_ids": torch.cat(positions)[None],
    }


def expected_gradients(local: nn.Module, step: int) -> dict[str, torch.Tensor | None]:
    """The mean over ranks of those of each rank's own sum, as both ways have it."""
    local.zero_grad()
    for rank, of_rank in enumerate(STEPS[step]):
        for nano_batch, lengths in enumerate(of_rank):
            if lengths:
                batch = batch_of(lengths, 100 * step + 10 * rank + nano_batch)
                (local(**batch).square().sum() / dist.get_world_size()).backward()
    return {name: parameter.grad for name, parameter in local.named_parameters()}


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(PingPong(model))


def sharded(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    fully_shard(model)
    prepare_fsdp(model)
    return PingPong(model)


def train(make: Any, over_ranks: Any, rank: int, settings: Mapping[str, Any]) -> None:
    torch.manual_seed(0)
    model, local = make("distca"), make("sdpa")
    local.load_state_dict(model.state_dict())
    options = SessionOptions.for_model(model, **settings)
    parallel = over_ranks(model)
    with Session.open(options) as session:
        for step, by_rank in enumerate(STEPS):
            lengths = by_rank[rank]
            batches = [batch_of(its, 100 * step + 10 * rank + i) for i, its in enumerate(lengths)]
            session.submit(RankManifest.from_lengths(step, rank, lengths))
            model.zero_grad()
            with session.step(step):
                outputs = parallel(batches)
                sum(output.square().sum() for output in outputs).backward()
            for name, expected in expected_gradients(local, step).items():
                gradient = model.get_parameter(name).grad
                assert gradient is not None, name
                found = whole(gradient)
                assert expected is not None, name
                # float32 through two layers, in another order. Of one expert a token the weight is
                # 1 whatever the router says, whose gradients are roundings alone.
                error = float((found - expected).abs().max())
                largest = max(float(expected.abs().max()), 1e-2)
                assert error <= 2e-5 * largest, (make, over_ranks, step, name, error)


def main(control_plane: str, folder: str) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo")
    for make, over_ranks in itertools.product((Experts, Towers), (replicated, sharded)):
        settings = {
            "control_plane": control_plane,
            "job": f"{make.__name__}-{over_ranks.__name__}",
            "rank": rank,
            "n_ranks": dist.get_world_size(),
            "placement": "mixed",
            **on_this_host(Path(folder)),
        }
        train(make, over_ranks, rank, settings)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
