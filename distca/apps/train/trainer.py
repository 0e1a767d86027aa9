"""One rank's training: model, optimiser, and the step in which core attention is served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from distca.apps.data.batch import TokenBatch
from distca.apps.data.packing import PackedStep
from distca.apps.train.language_model import LanguageModel, has_plain_head
from distca.apps.train.layers import checkpoint_layers, compile_layers, decoder_layers
from distca.apps.train.ranks import sum_over_ranks
from distca.apps.train.settings import Sharding, TrainingSettings
from distca.apps.train.sharding import shard_model, whole
from distca.errors import DivergenceError, ModelConfigError
from trainer_client import Session, StepReport, TraceEvent
from trainer_client.step.ping_pong import PingPong

_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


@dataclass(frozen=True)
class StepResult:
    """The result of a step on this rank.

    Attributes:
        loss: of all ranks, mean over the predicted tokens.
        report: this rank's times.
        trace: this rank's timeline.
    """

    loss: float
    report: StepReport
    trace: list[TraceEvent]


class Trainer:
    """A model under data-parallel training. All ranks hold equal weights, or a share each.

    Args:
        model: built with ``attn_implementation="distca"``, on the device of this rank.
        session: this rank's membership in the job.
        settings: batch and optimiser; ``learning_rate``, ``sharding`` and
            ``activation_checkpointing`` are given.
        compute_dtype: of sharded models' activations; others compute in their weights' dtype.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        session: Session,
        settings: TrainingSettings,
        compute_dtype: torch.dtype,
    ) -> None:
        self.model = model
        self._session = session
        self._settings = settings
        self._device = model.device
        self._n_ranks = session.options.n_ranks
        if settings.compile_layers:
            compile_layers(decoder_layers(model))
        if settings.activation_checkpointing:
            checkpoint_layers(decoder_layers(model))
        plain_head = has_plain_head(model)
        root = PingPong(LanguageModel(model, settings.loss_chunk_tokens, plain_head=plain_head))
        self._module: nn.Module
        if settings.sharding is Sharding.FSDP:
            self._module = shard_model(
                root,
                decoder_layers(model),
                n_ranks=self._n_ranks,
                device=self._device,
                compute_dtype=compute_dtype,
            )
        else:
            self._module = DistributedDataParallel(root)
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate_at(0),
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
            fused=self._device.type == "cuda",
        )

    def run(self, packed: PackedStep, batches: list[TokenBatch]) -> StepResult:
        """Forward and backward of one step; leaves the gradients of all ranks in the model.

        Args:
            packed: the step, whose manifest has been submitted.
            batches: this rank's nano-batches.
        """
        self._optimizer.zero_grad()
        with self._session.step(packed.step) as running:
            losses = self._module([vars(batch.to(self._device)) for batch in batches])
            loss = torch.stack(losses).sum() / packed.predicted_tokens
            # Gradients are averaged over the ranks, but each has only its own share of the sum.
            (loss * self._n_ranks).backward()
        if not running.complete:
            raise ModelConfigError(
                f"step {packed.step}: core attention was not called once a layer and nano-batch, "
                "forward and backward; the layers must use their config's attention implementation"
            )
        assert running.report is not None
        (total,) = sum_over_ranks(float(loss.detach()))
        return StepResult(total, running.report, running.trace)

    def update(self, step: int) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping.

        Raises:
            DivergenceError: the norm is not finite, so the weights would be lost.
        """
        most = self._settings.max_gradient_norm
        norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), most)))
        if not math.isfinite(norm):
            raise DivergenceError(
                f"step {step}: the gradients' norm is {norm}; lower --learning-rate"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate_at(step)
        self._optimizer.step()
        return norm

    @property
    def n_parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def weights(self) -> dict[str, Any]:
        """The state dict of the whole model, on every rank. All ranks call it."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """The gradients of all parameters, gathered one by one. All ranks call it."""
        for name, parameter in self.model.named_parameters():
            yield name, None if parameter.grad is None else whole(parameter.grad)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole state dicts of model and optimiser, by names, for the first rank to save. All ranks
        call it; what is gathered of a sharded model is empty on the others."""
        gathered: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(
            self.model, self._optimizer, options=_WHOLE
        )
        return gathered

    def load_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave the first rank, of this run or of one whose weights were
        spread otherwise."""
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=model,
            optim_state_dict=optimizer,
            options=_WHOLE,
        )
