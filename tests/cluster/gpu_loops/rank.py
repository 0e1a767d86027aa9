"""One rank of a combination: a user's loop around an attached model, and what it does beside; then
all gradients compared with those of an ordinary model, as ``distca train --verify`` does.

python -m tests.cluster.gpu_loops.rank SETTINGS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

import distca
from benchmarks.rank_group import begin_rank
from core_attention.shape import AttentionShape
from distca.apps.train.verify import WIDER, Verifier
from tests.cluster.gpu_loops.hazards import Hazards
from tests.cluster.gpu_loops.matrix import Combination
from tests.support.cluster import on_this_host

N_RANKS, N_STEPS = 2, 5
HEADS, KV_HEADS = 8, 4
HEAD_DIM = {"cuda": 128, "cpu": 16}


@dataclass(frozen=True)
class Settings:
    """What a rank is given.

    Attributes:
        combination: its fields.
        control_plane: its address.
        folder: of findings.
        profiles: where servers look for cost profiles.
        device: cuda or cpu.
        tokens: of a rank and step.
    """

    combination: dict[str, Any]
    control_plane: str
    folder: str
    profiles: str
    device: str
    tokens: int


def shape_of(device: str) -> AttentionShape:
    """Of core attention on that type of device."""
    dim, dtype = HEAD_DIM[device], "bfloat16" if device == "cuda" else "float32"
    return AttentionShape(
        num_heads=HEADS, num_heads_kv=KV_HEADS, head_dim=dim, head_dim_v=dim, dtype=dtype
    )


def make_model(device: str, implementation: str, dtype: str) -> Any:
    hidden = HEADS * HEAD_DIM[device]
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2**15,
        use_cache=False,
    )
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(
        config, attn_implementation=implementation, dtype=getattr(torch, dtype)
    )
    return model.to(device)


def documents(step: int, rank: int, tokens: int) -> list[torch.Tensor]:
    """A rank's; in turn one of them holds a document so long that rows of it travel."""
    generator = torch.Generator().manual_seed(step * N_RANKS + rank)
    long = tokens // 2 if step % N_RANKS == rank else 0
    short = max(tokens // 24, 2)
    lengths = ([long] if long else []) + [short] * ((tokens - long) // short)
    return [torch.randint(8, 512, (n,), generator=generator) for n in lengths]


class Kept:
    """Weights and gradients of each step, in memory that is there before the loop."""

    def __init__(self, model: Any) -> None:
        self._parameters = list(model.parameters())
        self._steps = [
            [(torch.empty_like(each), torch.empty_like(each)) for each in self._local()]
            for _ in range(N_STEPS)
        ]

    def _local(self) -> list[torch.Tensor]:
        return [_on_this_rank(parameter.detach()) for parameter in self._parameters]

    def note(self, step: int) -> None:
        for (weight, gradient), own, parameter in zip(
            self._steps[step], self._local(), self._parameters, strict=True
        ):
            weight.copy_(own)
            gradient.copy_(_on_this_rank(parameter.grad))

    def whole(self, step: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of all ranks, which call this together."""
        return [
            (_of_all_ranks(weight, parameter), _of_all_ranks(gradient, parameter))
            for (weight, gradient), parameter in zip(
                self._steps[step], self._parameters, strict=True
            )
        ]


def _on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _of_all_ranks(own: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return own
    whole = DTensor.from_local(
        own, parameter.device_mesh, parameter.placements, shape=parameter.shape,
        stride=parameter.stride(), run_check=False,
    )  # fmt: skip
    return whole.full_tensor()


class Loop:
    """A user's loop.

    Args:
        settings: of the rank.
        rank: this one.
        device: of the rank, made current.
    """

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self._settings, self._rank, self._device = settings, rank, device
        self._combination = chosen = Combination(**settings.combination)
        self._dtype = shape_of(settings.device).dtype
        self._model = make_model(settings.device, "distca", self._dtype)
        self._attached = distca.attach(
            self._model,
            control_plane=settings.control_plane,
            job=chosen.name,
            placement=chosen.placement,
            turns=chosen.turns,
            **on_this_host(Path(settings.profiles)),
        )
        self._wrapped = self._wrap()
        fused = True if chosen.hazard == "adamw-fused" else None
        foreach = True if chosen.hazard == "adamw-foreach" else None
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=1e-4, fused=fused, foreach=foreach
        )
        folder = Path(settings.folder, "checkpoint")
        self._hazards = Hazards(chosen.hazard, self._model, device, folder)
        self._kept = Kept(self._model)
        self._losses: list[torch.Tensor] = []
        length = 2 if chosen.hazard == "accumulation" else 1
        self._rounds = [
            range(begin, min(begin + length, N_STEPS)) for begin in range(0, N_STEPS, length)
        ]

    def _wrap(self) -> Any:
        if self._combination.wrapper == "fsdp":
            for unit in (*self._model.model.layers, self._model):
                fully_shard(unit)
        if self._combination.wrapper == "ddp":
            return DistributedDataParallel(self._model)
        return self._model

    def _held(self, steps: Sequence[int], rank: int) -> list[list[torch.Tensor]]:
        return [documents(step, rank, self._settings.tokens) for step in steps]

    def _labels(self, steps: Sequence[int]) -> int:
        """Of all ranks."""
        of_ranks = [self._held(steps, rank) for rank in range(N_RANKS)]
        return sum(len(each) - 1 for held in of_ranks for step in held for each in step)

    def run(self) -> None:
        for steps in self._rounds:
            labels = torch.tensor(self._labels(steps) / N_RANKS, device=self._device)
            for step in steps:
                self._train(step, labels, is_last=step == steps[-1])
            self._update(steps[-1])

    def _train(self, step: int, labels: torch.Tensor, *, is_last: bool) -> None:
        collator: Any = DataCollatorWithFlattening  # without annotations
        (held,) = self._held([step], self._rank)
        batch = collator()([{"input_ids": each} for each in held])
        self._hazards.before_step(step, batch)
        wrapper = self._combination.wrapper
        if wrapper == "fsdp":
            self._model.set_requires_gradient_sync(is_last)
        with self._wrapped.no_sync() if wrapper == "ddp" and not is_last else nullcontext():
            on_device = {name: tensor.to(self._device) for name, tensor in batch.items()}
            loss = self._wrapped(**on_device, num_items_in_batch=labels).loss
            self._hazards.after_forward(loss)
            loss.backward()
        self._hazards.after_backward()
        self._losses.append(loss.detach())

    def _update(self, step: int) -> None:
        if self._combination.wrapper == "own":
            for parameter in self._model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= N_RANKS
        self._kept.note(step)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._hazards.after_update()

    def findings(self) -> dict[str, Any]:
        """Once the loop is over; all ranks call it together."""
        session: Any = self._attached.session
        counted: dict[str, float] = {}
        for family in session.metrics_registry.collect():
            for sample in family.samples:
                counted[sample.name] = counted.get(sample.name, 0.0) + sample.value
        self._attached.close()
        losses = torch.stack(self._losses).float()
        dist.all_reduce(losses)
        local = make_model(self._settings.device, "sdpa", WIDER[self._dtype])
        names = [name for name, _ in local.named_parameters()]
        verifier = Verifier(local, self._dtype)
        for steps in self._rounds:
            kept = self._kept.whole(steps[-1])
            verifier.compare(
                [each.to(self._device) for held in self._held(steps, self._rank) for each in held],
                self._labels(steps),
                float(losses[list(steps)].sum()) / N_RANKS,
                {name: weight for name, (weight, _) in zip(names, kept, strict=True)},
                [(name, gradient) for name, (_, gradient) in zip(names, kept, strict=True)],
            )
        return {
            **asdict(verifier.result),
            "sent_bytes": counted["distca_data_plane_sent_bytes_total"],
            "recoveries": counted["distca_trainer_recovery_seconds_count"],
        }


def main(settings: Settings) -> None:
    begin_rank()
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group()
    loop = Loop(settings, rank, device)
    loop.run()
    found = loop.findings()
    Path(settings.folder, f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Settings(**json.loads(sys.argv[1])))
