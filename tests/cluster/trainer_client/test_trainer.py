"""The Trainer of transformers and those of TRL, which pack batches, pad them or make their own,
train with DistCA as with local attention. tests/cluster/others has some of them on two ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

import distca
from tests.cluster.others.material import tokenizer, words
from tests.support.cluster import NODE_SHAPE, Cluster, keep_profile
from tests.support.loops import attached
from tests.support.tiny_models import TINY_LLAMA

VOCABULARY: int = TINY_LLAMA["vocab_size"]
SETTINGS: dict[str, Any] = {
    "use_cpu": True,
    "per_device_train_batch_size": 4,
    "max_steps": 3,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "max_grad_norm": 0.5,
    "bf16": False,
}
# float32 through two layers, on the same weights: a few hundred roundings of 6e-8. Then three steps
# of AdamW in which such gradients are divided by their own size.
EXACT = (2e-5, 2e-4)
# Q, K, V, O and their gradients are rounded to 8 bits (4e-3) by kernels that sum differently.
HALF = (6e-2, 3e-2)
"""Tolerances of gradients and logs."""

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


def documents(n: int, longest: int, seed: int = 1) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=generator)
    return [
        {"input_ids": torch.randint(4, VOCABULARY, (int(k),), generator=generator).tolist()}
        for k in lengths
    ]


def pairs() -> list[dict[str, str]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {
            name: words(n, generator)
            for name, n in zip(("prompt", "chosen", "rejected"), its, strict=True)
        }
        for its in LENGTHS
    ]


def loaded(implementation: str, folder: Path, task: str = "CausalLM", **fields: Any) -> Any:
    """A model as people have it: from a folder, which DPO loads its reference from as well."""
    auto: Any = getattr(transformers, f"AutoModelFor{task}")
    if not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            **TINY_LLAMA, pad_token_id=0, eos_token_id=1, bos_token_id=None, **fields
        )
        auto.from_config(config).save_pretrained(folder)
    return auto.from_pretrained(folder, attn_implementation=implementation)


def plain(implementation: str, folder: Path, **settings: Any) -> Trainer:
    """Everything at once: accumulation, checkpoints of activations, evaluation, saving."""
    collator: Any = DataCollatorWithFlattening
    args = transformers.TrainingArguments(
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        **{**settings, "save_strategy": "steps", "save_steps": 2},
    )
    return Trainer(
        loaded(implementation, folder),
        args,
        data_collator=collator(),
        train_dataset=documents(30, 90),
        eval_dataset=documents(8, 40, seed=2),
    )


def sft(implementation: str, folder: Path, *, adapters: Any = None, **settings: Any) -> Trainer:
    """TRL as it is set by default: activation checkpoints, its own head and loss."""
    trainer: Trainer = SFTTrainer(
        loaded(implementation, folder),
        SFTConfig(**{"max_length": 128, **settings}),
        train_dataset=Dataset.from_list(documents(60, 60)),
        processing_class=tokenizer(),
        peft_config=adapters,
    )
    return trainer


def preference(
    trainer: Any, config: Any, implementation: str, folder: Path, *, task: str = "CausalLM",
    fields: Any = None, **settings: Any,
) -> Any:  # fmt: skip
    return trainer(
        loaded(implementation, folder, task, **(fields or {})),
        args=config(**settings),
        train_dataset=Dataset.from_list(pairs()),
        processing_class=tokenizer(),
    )


def dpo(implementation: str, folder: Path, **settings: Any) -> Any:
    return preference(DPOTrainer, DPOConfig, implementation, folder, **settings)


def orpo(implementation: str, folder: Path, **settings: Any) -> Any:
    return preference(ORPOTrainer, ORPOConfig, implementation, folder, **settings)


def reward(implementation: str, folder: Path, **settings: Any) -> Any:
    given = {"task": "SequenceClassification", "fields": {"num_labels": 1}, **settings}
    return preference(RewardTrainer, RewardConfig, implementation, folder, **given)


def grpo(implementation: str, folder: Path, *, kind: Any = GRPOTrainer, **settings: Any) -> Any:
    return kind(
        loaded(implementation, folder),
        reward_funcs=lambda completions, **_: [float(len(set(c.split()))) for c in completions],
        args=GRPOConfig(num_generations=2, max_completion_length=6, **settings),
        train_dataset=Dataset.from_list([{"prompt": pair["prompt"]} for pair in pairs()]),
        processing_class=tokenizer(),
    )


class TreeTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPO whose groups are packed as trees, as docs/rl.md has it."""

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Any,
        attention_mask: Any,
        logits_to_keep: int,
        *_: Any,
        **__: Any,
    ) -> Any:
        tree, padded = distca.pack_padded_tree(input_ids, attention_mask, logits_to_keep)
        logits = model(**tree.inputs, logits_to_keep=tree.logits_to_keep).logits
        scores = tree.log_probs_and_entropies(logits, temperature=self.temperature)
        return *map(padded, scores), None


def grpo_trees(implementation: str, folder: Path, **settings: Any) -> Any:
    kind = TreeTrainer if implementation == "distca" else GRPOTrainer
    return grpo(implementation, folder, kind=kind, **settings)


LORA = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
RUNS: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "plain": (plain, {}, "pool"),
    "packing": (sft, {"packing": True}, "pool"),
    "padding-free": (sft, {"padding_free": True, "max_length": None}, "in-place"),
    "lora": (sft, {"packing": True, "adapters": LORA}, "pool"),
    "bfloat16": (sft, {"packing": True, "bf16": True}, "in-place"),
    "dpo": (dpo, {"max_steps": 2}, "pool"),
    "orpo": (orpo, {"max_steps": 2}, "pool"),
    "reward": (reward, {"max_steps": 2}, "pool"),
    "grpo": (grpo, {"max_steps": 2}, "pool"),
    "grpo-trees": (grpo_trees, {"max_steps": 2}, "pool"),
}
"""By name: how the trainer is made, with which settings, and where core attention is served."""


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the first optimiser's step."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self.kept:
            named = kwargs["model"].named_parameters()
            self.kept = {name: p.grad.clone() for name, p in named if p.grad is not None}


@dataclasses.dataclass(frozen=True)
class Trained:
    """Gradients of the first step, and losses and norms of all."""

    gradients: dict[str, torch.Tensor]
    log: list[dict[str, float]]

    @classmethod
    def by(cls, trainer: Any, resume: str | None = None) -> Trained:
        gradients = FirstGradients()
        trainer.add_callback(gradients)
        trainer.train(resume_from_checkpoint=resume)
        kept = ("loss", "grad_norm", "step")
        entries = trainer.state.log_history
        log = [{k: float(v) for k, v in e.items() if k.endswith(kept)} for e in entries]
        return cls(gradients.kept, log)

    def compare(self, local: Trained, of_gradients: float, of_log: float) -> None:
        assert self.gradients.keys() == local.gradients.keys() != set()
        for name, expected in local.gradients.items():
            difference = (self.gradients[name] - expected).abs().max()
            assert difference <= of_gradients * expected.abs().max(), name
        assert len(local.log) >= 2
        for mine, theirs in zip(self.log, local.log, strict=True):
            assert mine == pytest.approx(theirs, rel=of_log)


def settings_in(folder: Path, **changes: Any) -> dict[str, Any]:
    return {**SETTINGS, "output_dir": str(folder / "out"), **changes}


@pytest.mark.parametrize("name", RUNS)
def test_trains_as_with_local_attention(
    name: str, tmp_path: Path, pool_of_four: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    keep_profile(pool_of_four.folder, dataclasses.replace(NODE_SHAPE, dtype="bfloat16"))
    make, changes, placement = RUNS[name]
    local = Trained.by(make("sdpa", tmp_path, **settings_in(tmp_path, **changes)))
    trainer = make("distca", tmp_path, **settings_in(tmp_path, **changes))
    with attached(pool_of_four, trainer.model, f"trainer-{name}", placement=placement) as door:
        served = Trained.by(trainer)
        assert door.session is not None
        assert door.session.next_step >= trainer.args.max_steps
    served.compare(local, *(HALF if name == "bfloat16" else EXACT))


def test_resumes_from_a_checkpoint(tmp_path: Path, pool_of_four: Cluster) -> None:
    logs: list[list[dict[str, float]]] = []
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        trainer: Any = plain("distca", tmp_path, **settings_in(tmp_path))
        job = f"resumed-{len(logs)}"
        with attached(pool_of_four, trainer.model, job, placement="in-place"):
            logs.append(Trained.by(trainer, resume).log)
    whole, resumed = ([entry for entry in log if "loss" in entry] for log in logs)
    assert resumed[-1] == pytest.approx(whole[-1], rel=EXACT[1])


def test_the_trainers_own_log_has_the_balance(tmp_path: Path, pool_of_four: Cluster) -> None:
    trainer: Any = plain("distca", tmp_path, **settings_in(tmp_path))
    flops = 6 * trainer.model.num_parameters()
    distca.log_scalars(trainer, flops_per_token=flops, peak_flops=1e12)
    with attached(pool_of_four, trainer.model, "scalars", placement="in-place"):
        trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    for entry in logged:
        assert entry["distca/tokens_per_second"] > 0
        assert 0 < entry["distca/mfu"] < 1
    # A server may report a step after its rank.
    shown = [entry for entry in logged if "distca/imbalance" in entry][-1]
    assert shown["distca/step_seconds"] >= shown["distca/wait_seconds"] >= 0
    # Of one server, which nothing leaves.
    assert shown["distca/home_imbalance"] == shown["distca/imbalance"] == 1
    assert shown["distca/saved_seconds"] == 0
    evaluated = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert evaluated
    assert not any("distca/mfu" in entry for entry in evaluated)
