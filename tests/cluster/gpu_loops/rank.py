"""One rank of a combination: a user's loop, and what it does beside; then all
gradients compared with those of an ordinary model that runs each document alone in a wider dtype.

python -m tests.cluster.gpu_loops.rank SETTINGS
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening, LlamaConfig

import trainer_client.models.transformers  # noqa: F401  registers "distca"
from benchmarks.rank_group import begin_rank
from core_attention.shape import AttentionShape
from distca.apps.train.verify import relative_difference
from tests.cluster.gpu_loops.hazards import Hazards
from tests.cluster.gpu_loops.matrix import Combination
from tests.support.loops import PingPong, submitted
from trainer_client import Session, SessionOptions, labels_per_rank, prepare_fsdp
from trainer_client.turns.parts import split_documents

N_RANKS, N_STEPS = 2, 5
HEADS, KV_HEADS = 8, 4
HEAD_DIM = {"cuda": 128, "cpu": 16}
QUIET = 1e-3
"""Differences count relative to a parameter's largest gradient, but to no less than this part of
the largest of all, as in ``--verify``: gradients of queries and keys may be sums that cancel."""


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

    @property
    def wider(self) -> torch.dtype:
        return torch.float32 if self.device == "cuda" else torch.float64


def shape_of(device: str) -> AttentionShape:
    """Of core attention on that type of device."""
    dim, dtype = HEAD_DIM[device], "bfloat16" if device == "cuda" else "float32"
    return AttentionShape(
        num_heads=HEADS, num_heads_kv=KV_HEADS, head_dim=dim, head_dim_v=dim, dtype=dtype
    )


def config(device: str) -> LlamaConfig:
    hidden = HEADS * HEAD_DIM[device]
    return LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2**15,
        use_cache=False,
    )


def documents(step: int, rank: int, tokens: int) -> list[torch.Tensor]:
    """A rank's; in turn one of them holds a document so long that rows of it travel."""
    generator = torch.Generator().manual_seed(step * N_RANKS + rank)
    long = tokens // 2 if step % N_RANKS == rank else 0
    short = max(tokens // 24, 2)
    lengths = ([long] if long else []) + [short] * ((tokens - long) // short)
    return [torch.randint(8, 512, (n,), generator=generator) for n in lengths]


def loader(rank: int, tokens: int, lanes: int) -> Iterator[list[dict[str, Any]]]:
    collator: Any = DataCollatorWithFlattening  # without annotations
    pack = collator()
    for step in range(N_STEPS):
        left = documents(step, rank, tokens)
        nano_batches = []
        for lengths in split_documents([len(each) for each in left], lanes):
            nano_batches.append(pack([{"input_ids": left.pop(0)} for _ in lengths]))
        yield nano_batches


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
    """A user's loop, with nano-batches of its own.

    Args:
        settings: of the rank.
        rank: this one.
        device: of the rank, made current.
    """

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self._settings, self._rank, self._device = settings, rank, device
        self._combination = chosen = Combination(**settings.combination)
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_config(
            config(settings.device),
            attn_implementation="distca",
            dtype=getattr(torch, shape_of(settings.device).dtype),
        )
        self._model.to(device)
        self._options = SessionOptions.for_model(
            self._model,
            control_plane=settings.control_plane,
            job=chosen.name,
            rank=rank,
            n_ranks=N_RANKS,
            n_nano_batches=chosen.lanes,
            placement=chosen.placement,
            data_host="127.0.0.1",
            one_host=True,
            profile_dir=Path(settings.profiles),
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
        self._reports: list[Any] = []

    def _wrap(self) -> Any:
        if self._combination.wrapper == "fsdp":
            for layer in self._model.model.layers:
                fully_shard(layer)
            fully_shard(self._model)
            prepare_fsdp(self._model)
        ping_pong = PingPong(self._model)
        if self._combination.wrapper == "ddp":
            return DistributedDataParallel(ping_pong)
        return ping_pong

    def _reduces(self, step: int) -> bool:
        """Whether the step ends an accumulation of gradients."""
        return self._combination.hazard != "accumulation" or step % 2 == 1 or step == N_STEPS - 1

    def _accumulating(self, step: int) -> Any:
        """A block for forward and backward."""
        if self._combination.wrapper == "fsdp":
            self._model.set_requires_gradient_sync(self._reduces(step))
        elif self._combination.wrapper == "ddp" and not self._reduces(step):
            return self._wrapped.no_sync()
        return nullcontext()

    def run(self) -> None:
        batches_of_ranks = loader(self._rank, self._settings.tokens, self._combination.lanes)
        with Session.open(self._options) as session:
            for step, nano_batches in submitted(session, batches_of_ranks):
                self._hazards.before_step(step, nano_batches)
                with session.step(step) as running, self._accumulating(step):
                    labels = labels_per_rank(nano_batches, device=self._device)
                    batches = self._on_device(nano_batches, labels)
                    loss = sum(output.loss for output in self._wrapped(batches))
                    assert isinstance(loss, torch.Tensor)
                    self._hazards.after_forward(loss)
                    loss.backward()
                    self._hazards.after_backward()
                self._losses.append(loss.detach())
                self._reports.append(running.report)
                if self._reduces(step):
                    self._update(step)
                self._hazards.after_update()

    def _update(self, step: int) -> None:
        if self._combination.wrapper == "own":
            for parameter in self._model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= N_RANKS
        self._kept.note(step)
        self._hazards.after_step()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _on_device(self, nano_batches: Any, labels: Any) -> list[dict[str, Any]]:
        return [
            {name: tensor.to(self._device) for name, tensor in batch.items()}
            | {"num_items_in_batch": labels}
            for batch in nano_batches
        ]

    def findings(self) -> dict[str, Any]:
        """Once the loop is over; all ranks call it together, and rank 0 compares."""
        losses = torch.stack(self._losses).float()
        dist.all_reduce(losses)
        reference = None if self._rank else Reference(self._settings, self._device)
        compared, begin = [], 0
        for step in filter(self._reduces, range(N_STEPS)):
            kept = self._kept.whole(step)
            if reference is not None:
                steps = range(begin, step + 1)
                compared.append(reference.compare(steps, losses[begin : step + 1] / N_RANKS, kept))
            begin = step + 1
        return {
            "compared": compared,
            "sent_bytes": sum(report.sent_bytes for report in self._reports),
            "recoveries": sum(report.recoveries for report in self._reports),
            "replayed_ticks": sum(report.replayed_ticks for report in self._reports),
            "step_seconds": [round(report.step_seconds, 2) for report in self._reports],
        }


class Reference:
    """An ordinary model: every document alone, SDPA, in a wider dtype."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        auto: Any = AutoModelForCausalLM
        self._tokens, self._device = settings.tokens, device
        self._model = auto.from_config(
            config(settings.device), attn_implementation="sdpa", dtype=settings.wider
        )
        self._model.to(device)

    def compare(
        self,
        steps: Sequence[int],
        losses: torch.Tensor,
        kept: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> dict[str, Any]:
        """The largest relative differences of the losses of ``steps`` and their gradients' sum.

        Args:
            steps: between two updates.
            losses: of each, the mean over all labels.
            kept: weights and gradients, of all ranks.
        """
        named = list(self._model.named_parameters())
        with torch.no_grad():
            for (_, mine), (weight, _) in zip(named, kept, strict=True):
                mine.copy_(weight)
        self._model.zero_grad()
        off = 0.0
        for step, loss in zip(steps, losses.tolist(), strict=True):
            right = self._backward(step)
            off = max(off, abs(loss - right) / right)
        largest = max(float(mine.grad.abs().max()) for _, mine in named)
        differences = {
            name: relative_difference(gradient, mine.grad, floor=QUIET * largest)
            for (name, mine), (_, gradient) in zip(named, kept, strict=True)
        }
        parameter = max(
            differences,
            key=lambda name: (differences[name] != differences[name], differences[name]),
        )
        return {"loss": off, "gradient": differences[parameter], "parameter": parameter}

    def _backward(self, step: int) -> float:
        held = [each for rank in range(N_RANKS) for each in documents(step, rank, self._tokens)]
        labels, total = sum(len(each) - 1 for each in held), 0.0
        for document in held:
            ids = document.to(self._device)[None]
            logits = self._model(input_ids=ids).logits[0, :-1]
            summed = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
            loss = summed / labels
            loss.backward()
            total += float(loss.detach())
        return total


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
