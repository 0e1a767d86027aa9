"""Trainers of TRL that pad their batches, with a reference model or without, and those that make
batches of their own, train with DistCA as with local attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

from tests.cluster.trainer_client.trainer_runs import CONFIG, SETTINGS, FirstGradients, tokenizer
from tests.support.cluster import Cluster
from tests.support.loops import attached

GRADIENTS, LOG = 2e-5, 2e-4
"""float32 through two layers on the same weights; then steps of AdamW, which divides gradients by
their own size."""
LENGTHS = (
    (1, 1, 1),
    (5, 9, 2),
    (3, 1, 30),
    (17, 4, 4),
    (2, 40, 7),
    (1, 33, 6),
    (8, 2, 3),
    (4, 5, 6),
)
"""Of prompts, chosen and rejected completions."""


def words(n: int, seed: int) -> str:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, CONFIG["vocab_size"], (n,), generator=generator).tolist()
    return " ".join(f"t{i}" for i in ids)


def pairs() -> list[dict[str, str]]:
    names = ("prompt", "chosen", "rejected")
    return [
        {name: words(n, 10 * at + i) for i, (name, n) in enumerate(zip(names, its, strict=True))}
        for at, its in enumerate(LENGTHS)
    ]


def spaced() -> Any:
    from tokenizers.pre_tokenizers import WhitespaceSplit

    made = tokenizer()
    made.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return made


def loaded(auto: Any, implementation: str, folder: Path, **fields: Any) -> Any:
    """A model as people have it: from a folder, which DPO loads its reference from as well."""
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **CONFIG, pad_token_id=0, eos_token_id=1, bos_token_id=None, **fields
        )
        auto.from_config(config).save_pretrained(folder)
    return auto.from_pretrained(folder, attn_implementation=implementation)


def dpo(implementation: str, folder: Path, **given: Any) -> Any:
    model = loaded(transformers.AutoModelForCausalLM, implementation, folder)
    return DPOTrainer(
        model, args=DPOConfig(**given), train_dataset=Dataset.from_list(pairs()),
        processing_class=spaced(),
    )  # fmt: skip


def reward(implementation: str, folder: Path, **given: Any) -> Any:
    model = loaded(
        transformers.AutoModelForSequenceClassification, implementation, folder, num_labels=1
    )
    return RewardTrainer(
        model, args=RewardConfig(**given), train_dataset=Dataset.from_list(pairs()),
        processing_class=spaced(),
    )  # fmt: skip


def grpo(implementation: str, folder: Path, **given: Any) -> Any:
    model = loaded(transformers.AutoModelForCausalLM, implementation, folder)
    return GRPOTrainer(
        model,
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        args=GRPOConfig(num_generations=2, max_completion_length=6, **given),
        train_dataset=Dataset.from_list([{"prompt": pair["prompt"]} for pair in pairs()]),
        processing_class=spaced(),
    )


def orpo(implementation: str, folder: Path, **given: Any) -> Any:
    model = loaded(transformers.AutoModelForCausalLM, implementation, folder)
    return ORPOTrainer(
        model, args=ORPOConfig(**given), train_dataset=Dataset.from_list(pairs()),
        processing_class=spaced(),
    )  # fmt: skip


def trained(trainer: Any) -> tuple[dict[str, list[float]], list[dict[str, float]]]:
    """Gradients of the first step, and losses and norms of all."""
    gradients = FirstGradients()
    trainer.add_callback(gradients)
    trainer.train()
    kept = ("loss", "grad_norm")
    log = [{k: float(v) for k, v in e.items() if k in kept} for e in trainer.state.log_history]
    return gradients.kept, [entry for entry in log if entry]


def settings(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**SETTINGS, "output_dir": str(folder / "out"), "max_steps": 2, **changes}


def compare(served: Any, local: Any) -> None:
    assert served[0].keys() == local[0].keys() != set()
    for name, gradient in local[0].items():
        expected = torch.tensor(gradient)
        difference = (torch.tensor(served[0][name]) - expected).abs().max()
        assert difference <= GRADIENTS * expected.abs().max(), name
    assert len(local[1]) >= 2
    for mine, theirs in zip(served[1], local[1], strict=True):
        assert mine == pytest.approx(theirs, rel=LOG)


@pytest.mark.parametrize("make", [dpo, reward, grpo, orpo])
def test_trains_as_with_local_attention(make: Any, tmp_path: Path, pool_of_four: Cluster) -> None:
    local = trained(make("sdpa", tmp_path, **settings(tmp_path)))
    trainer = make("distca", tmp_path, **settings(tmp_path))
    with attached(pool_of_four, trainer.model, make.__name__) as door:
        served = trained(trainer)
        assert door.session is not None
    compare(served, local)
