"""Training loops as documentation of their libraries has them, without DistCA; run by torchrun.

``loops.py LOOP MODEL IMPLEMENTATION``: every rank writes its losses to ``losses-<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, TrainingArguments
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

STEPS = 4
RATE = 0.1
Losses = list[float]


def loaded(**options: Any) -> Any:
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(sys.argv[2], attn_implementation=sys.argv[3], **options)
    # With a cache, transformers' sdpa lets documents of a packed row see each other.
    model.config.use_cache = False
    return model


def documents() -> Any:
    generator = torch.Generator().manual_seed(7)
    lengths = torch.randint(2, 40, (64,), generator=generator).tolist()
    return [{"input_ids": torch.randint(4, 64, (n,), generator=generator)} for n in lengths]


def loader() -> Any:
    collator: Any = DataCollatorWithFlattening
    return DataLoader(documents(), batch_size=4, collate_fn=collator())


def batches(*, rank: int | None = None) -> Iterator[dict[str, torch.Tensor]]:
    """Those of ``rank``; None: of this one."""
    mine = DataLoader(
        documents(),
        batch_size=4,
        collate_fn=loader().collate_fn,
        sampler=DistributedSampler(documents(), rank=rank, shuffle=False),
    )
    return (batch for _, batch in zip(range(STEPS), mine, strict=False))


def plain(model: Any, rank: int | None = None) -> Losses:
    """``rank``: whose batches they are; None: this one's."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    losses = []
    for batch in batches(rank=rank):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trainer() -> Losses:
    from transformers import Trainer

    settings: dict[str, Any] = {"report_to": [], "logging_steps": 1, "save_strategy": "no"}
    settings |= {"max_steps": STEPS, "gradient_accumulation_steps": 2, "optim": "sgd"}
    settings |= {"use_cpu": True, "learning_rate": RATE, "per_device_train_batch_size": 4}
    settings |= {"gradient_checkpointing": True, "eval_strategy": "steps", "eval_steps": 2}
    data, collator = documents(), loader().collate_fn
    made = Trainer(
        loaded(),
        TrainingArguments("out", **settings),
        train_dataset=data,
        eval_dataset=data[:16],
        data_collator=collator,
    )
    made.train()
    log = made.state.log_history
    return [entry[name] for entry in log for name in ("loss", "eval_loss") if name in entry]


def accelerate() -> Losses:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    made = loaded()
    optimizer = torch.optim.SGD(made.parameters(), lr=RATE)
    model, optimizer, data = accelerator.prepare(made, optimizer, loader())
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def lightning() -> Losses:
    from lightning import LightningModule, Trainer

    losses: Losses = []

    class Language(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = self.model(**batch).loss
            losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=RATE)

    settings: dict[str, Any] = {"accelerator": "cpu", "devices": 2, "strategy": "ddp"}
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    Trainer(max_steps=STEPS, **settings, **quiet).fit(Language(), loader())
    return losses


def fsdp1() -> Losses:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    device = torch.device("cpu")
    return plain(FullyShardedDataParallel(loaded(), auto_wrap_policy=policy, device_id=device))


def zero3() -> Losses:
    import deepspeed

    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": stage}
    settings["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    settings["zero_allow_untested_optimizer"] = True
    model = loaded()
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings
    )
    losses = []
    for batch in batches():
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def tensor_parallel() -> Losses:
    return plain(loaded(tp_plan="auto"), rank=0)


def verl() -> Losses:
    """The actor's engine, called as verl's worker does: log-probabilities without gradients, then
    micro-batches whose number follows from their lengths."""
    from tensordict import TensorDict
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class OnCpu(PlatformCUDA):
        """A platform of verl's without a GPU."""

        device_name, device_module = "cpu", torch.cpu

        def current_device(self) -> Any:
            return torch.device("cpu")

    platform_manager.set_platform(OnCpu())
    from verl.models.transformers import monkey_patch
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils
    from verl.workers.config import (
        ActorConfig,
        FSDPEngineConfig,
        FSDPOptimizerConfig,
        HFModelConfig,
    )
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss

    # It looks for a class of TRL's that today's TRL no longer has.
    monkey_patch.is_trl_available = lambda: False

    exact = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
    strategy = "fsdp2"
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=sys.argv[2], override_config={"attn_implementation": sys.argv[3]}),
        FSDPEngineConfig(strategy=strategy, mixed_precision=exact, use_torch_compile=False),
        FSDPOptimizerConfig(optimizer="SGD", lr=RATE, weight_decay=0, betas=None),
        CheckpointConfig(),
    )
    engine.initialize()
    actor = ActorConfig(strategy=strategy, rollout_n=1, ppo_micro_batch_size_per_gpu=-1)
    losses = []
    for step in range(2):
        rows, n_answered = _samples(seed=2 * step + dist.get_rank())
        data = TensorDict(dict(zip(rows, map(_nested, rows.values()), strict=True)), batch_size=8)
        settings = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 120, "global_batch_size": 16}
        tensordict_utils.assign_non_tensor(data, temperature=1.0, **settings)
        with engine.eval_mode():
            told = engine.infer_batch(data)["model_output"]["log_probs"]
        # Of the tokens that were answered, which those before them predict.
        answered = zip(told.unbind(), n_answered, strict=True)
        data["old_log_probs"] = _nested([row[-1 - n : -1] for row, n in answered])
        with engine.train_mode():
            found = engine.train_batch(data, partial(ppo_loss, config=actor))
        losses += [float(told.values().sum()), *found["loss"], found["metrics"]["grad_norm"]]
    return losses


def _samples(seed: int) -> tuple[dict[str, list[torch.Tensor]], list[int]]:
    """What a batch of verl's has by name, eight of each; and how long the responses are."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, 30, (2, 8), generator=generator).tolist()
    prompts, responses = (
        [torch.randint(4, 64, (n,), generator=generator) for n in part] for part in lengths
    )
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones(n) for n in lengths[1]]
    advantages = [torch.randn(n, generator=generator) for n in lengths[1]]
    rows = {"input_ids": whole, "position_ids": [torch.arange(len(each)) for each in whole]}
    rows |= {"prompts": prompts, "responses": responses, "advantages": advantages}
    return {**rows, "loss_mask": masks, "response_mask": masks}, lengths[1]


def _nested(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


LOOPS: dict[str, Callable[[], Losses]] = {
    each.__name__: each
    for each in (trainer, accelerate, lightning, fsdp1, zero3, tensor_parallel, verl)
}


def main() -> None:
    torch.manual_seed(0)
    name = sys.argv[1]
    if name not in ("trainer", "accelerate", "lightning"):
        dist.init_process_group("gloo")
    losses = LOOPS[name]()
    Path(f"losses-{os.environ['RANK']}.json").write_text(json.dumps(losses))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
