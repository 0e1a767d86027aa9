"""Trainings with the real libraries, each with local attention and with DistCA; run by torchrun.

``python -m torch.distributed.run ... trainer_runs.py CONTROL_PLANE FOLDER``: every rank writes what
it saw to ``FOLDER/rank<n>.json``, by run: the log of the trainer, and gradients of the first step.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from transformers import (
    DataCollatorWithFlattening,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
)
from trl import SFTConfig, SFTTrainer

import distca
from tests.support.cluster import on_this_host
from tests.support.tiny_models import TINY_LLAMA

CONFIG = TINY_LLAMA
VOCABULARY: int = CONFIG["vocab_size"]
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


class FirstGradients(TrainerCallback):
    """Keeps the gradients of the first optimiser's step."""

    def __init__(self) -> None:
        self.kept: dict[str, list[float]] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.kept:
            return
        for name, parameter in kwargs["model"].named_parameters():
            if parameter.grad is not None:
                self.kept[name] = parameter.grad.flatten().tolist()


def documents(n: int, longest: int, seed: int = 1) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (n,), generator=generator)
    return [
        {"input_ids": torch.randint(4, VOCABULARY, (int(k),), generator=generator).tolist()}
        for k in lengths
    ]


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    words = {f"t{i}": i for i in range(4, VOCABULARY)} | {"<pad>": 0, "<eos>": 1, "<unk>": 2}
    untyped: Any = PreTrainedTokenizerFast
    return untyped(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def model(implementation: str) -> Any:
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    config = transformers.AutoConfig.for_model("llama", **CONFIG)
    return auto.from_config(config, attn_implementation=implementation)


def plain(implementation: str, folder: str, callback: TrainerCallback) -> Trainer:
    """Everything at once: accumulation, checkpoints of activations, evaluation, saving."""
    collator: Any = DataCollatorWithFlattening
    args = transformers.TrainingArguments(
        output_dir=folder,
        gradient_accumulation_steps=2,
        gradient_checkpointing=True,
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=4,
        **{**SETTINGS, "save_strategy": "steps", "save_steps": 2},
    )
    return Trainer(
        model(implementation),
        args,
        data_collator=collator(),
        train_dataset=documents(30, 90),
        eval_dataset=documents(8, 40, seed=2),
        callbacks=[callback],
    )


def sft(implementation: str, folder: str, callback: TrainerCallback, **settings: Any) -> Trainer:
    """TRL as it is set by default: activation checkpoints, its own head and loss."""
    peft_config = settings.pop("peft_config", None)
    args = SFTConfig(output_dir=folder, **{**SETTINGS, "max_length": 128, **settings})
    trainer: Trainer = SFTTrainer(
        model(implementation),
        args,
        train_dataset=Dataset.from_list(documents(60, 60)),
        processing_class=tokenizer(),
        callbacks=[callback],
        peft_config=peft_config,
    )
    return trainer


LORA = LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
RUNS: dict[str, tuple[Any, dict[str, Any], tuple[str, ...]]] = {
    "plain": (plain, {}, ("in-place", "pool")),
    "packing": (sft, {"packing": True}, ("pool",)),
    "padding-free": (sft, {"padding_free": True, "max_length": None}, ("in-place",)),
    "lora": (sft, {"packing": True, "peft_config": LORA}, ("pool",)),
    "bfloat16": (sft, {"packing": True, "bf16": True}, ("in-place",)),
}
"""By name: how the trainer is made, with which settings, and where core attention is served."""


def run(
    make: Any,
    settings: dict[str, Any],
    implementation: str,
    folder: str,
    served: dict[str, Any],
    *,
    resume: str | None = None,
) -> dict[str, Any]:
    gradients = FirstGradients()
    trainer = make(implementation, folder, gradients, **settings)
    steps = 0
    if implementation == "distca":
        distca.log_scalars(
            trainer, flops_per_token=6 * trainer.model.num_parameters(), peak_flops=1e12
        )
        with distca.attach(trainer.model, **served) as attached:
            trainer.train(resume_from_checkpoint=resume)
            session: Any = attached.session
            steps = session.next_step
    else:
        trainer.train(resume_from_checkpoint=resume)
    kept = ("loss", "norm", "step")
    return {
        "log": [
            {name: float(value) for name, value in entry.items() if name.endswith(kept)}
            for entry in trainer.state.log_history
        ],
        "scalars": [
            {name: value for name, value in entry.items() if name.startswith("distca/")}
            for entry in trainer.state.log_history
            if "loss" in entry
        ],
        "gradients": gradients.kept,
        "steps": steps,
    }


def main(control_plane: str, folder: str) -> None:
    torch.set_num_threads(1)
    seen: dict[str, Any] = {}
    for name, (make, settings, placements) in RUNS.items():
        seen[name] = {"local": run(make, settings, "sdpa", f"{folder}/{name}-local", {})}
        for placement in placements:
            served = {
                "control_plane": control_plane,
                "job": f"{name}-{placement}",
                "placement": placement,
                **on_this_host(Path(folder)),
            }
            out = f"{folder}/{name}-{placement}"
            seen[name][placement] = run(make, settings, "distca", out, served)
            if (name, placement) == ("plain", "in-place"):
                served["job"] = "resumed"
                seen[name]["resumed"] = run(
                    make, settings, "distca", out, served, resume=f"{out}/checkpoint-2"
                )
    Path(folder, f"rank{os.environ['RANK']}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
