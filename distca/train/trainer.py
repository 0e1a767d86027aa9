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
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from distca.data.batch import TokenBatch
from distca.data.packing import PackedStep
from distca.errors import DivergenceError, ModelConfigError
from distca.train.checkpoint import is_by_number
from distca.train.language_model import LanguageModel, has_plain_head
from distca.train.layers import checkpoint_layers, compile_layers, decoder_layers
from distca.train.parallelism import Parallelism, replica_mesh
from distca.train.ranks import sum_over_ranks
from distca.train.settings import Sharding, TrainingSettings
from distca.train.sharding import ShardedModel, by_mesh, clip_gradients, squared_norm, whole
from distca.train.tensor_parallel import TensorParallel
from trainer_client import PingPong, Session, StepReport, TraceEvent


@dataclass(frozen=True)
class StepResult:
    """What a step gave on this rank.

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
        parallelism: of the run.
        mesh: its ranks.
        tensor_parallel: what has spread the model over tensor-parallel ranks; None if there are
            none.
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
        parallelism: Parallelism,
        mesh: DeviceMesh,
        *,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.model = model
        self._parallelism = parallelism
        self._tensor_parallel = tensor_parallel
        self._session = session
        self._settings = settings
        self._device = model.device
        if settings.compile_layers:
            compile_layers(decoder_layers(model))
        if settings.activation_checkpointing:
            checkpoint_layers(decoder_layers(model))
        language = LanguageModel(
            model, settings.loss_chunk_tokens, plain_head=has_plain_head(model)
        )
        ping_pong = PingPong(language)
        # DistributedDataParallel knows no weights that are spread over other ranks.
        self._is_sharded = settings.sharding is Sharding.FSDP or tensor_parallel is not None
        if self._is_sharded:
            sharded = ShardedModel(
                ping_pong,
                decoder_layers(model),
                mesh=replica_mesh(mesh, settings),
                compute_dtype=compute_dtype,
            )
            self._module: nn.Module = sharded.module
        else:
            self._module = DistributedDataParallel(ping_pong)
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(model.parameters())],
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

        Raises:
            SessionError: core attention failed; see ``Session.step``.
            ModelConfigError: the model computed attention otherwise, at least in part.
        """
        self._optimizer.zero_grad()
        with self._session.step(packed.step) as running:
            losses = self._module([vars(batch.to(self._device)) for batch in batches])
            loss = torch.stack(losses).sum() / packed.predicted_tokens
            # Gradients are averaged over the replicas, but each has only its own share of the sum.
            (loss * self._parallelism.n_replicas).backward()
        if not running.complete:
            raise ModelConfigError(
                f"step {packed.step}: the model did not call core attention as often as the job "
                "expects (once a layer and nano-batch, forward and backward); do its layers use "
                "the attention implementation of its config?"
            )
        if self._tensor_parallel is not None:
            self._tensor_parallel.share_gradients()
        assert running.report is not None
        (total,) = sum_over_ranks(float(loss.detach()))
        return StepResult(total / self._parallelism.tensor_parallel, running.report, running.trace)

    def update(self, step: int) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping.

        Raises:
            DivergenceError: the norm is not finite, so the weights would be lost.
        """
        norm = math.sqrt(squared_norm(self.model.parameters()))
        if not math.isfinite(norm):
            raise DivergenceError(
                f"step {step}: the gradients' norm is {norm}; lower --learning-rate"
            )
        clip_gradients(self.model.parameters(), norm, self._settings.max_gradient_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate_at(step)
        self._optimizer.step()
        return norm

    @property
    def n_parameters(self) -> int:
        """Of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def weights(self) -> dict[str, Any]:
        """The state dict of the whole model, on every rank. All ranks call it."""
        return {name: whole(tensor) for name, tensor in self.model.state_dict().items()}

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Those of all parameters, gathered one by one. All ranks call it."""
        for name, parameter in self.model.named_parameters():
            yield name, None if parameter.grad is None else whole(parameter.grad)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole state dicts of model and optimiser, by names, for the first rank to save. All ranks
        call it; those of a sharded model are gathered, and empty on the others."""
        if not self._is_sharded:
            return self.model.state_dict(), self._by_names(self._optimizer.state_dict())
        gathered: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(
            self.model, self._optimizer, options=_WHOLE
        )
        return gathered

    def load_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave the first rank, of this run or of one whose weights were
        spread otherwise."""
        if is_by_number(optimizer):
            optimizer = self._by_names(optimizer)
        _, own = get_state_dict(self.model, self._optimizer)
        set_state_dict(
            self.model,
            self._optimizer,
            model_state_dict=model,
            # Groups are those of this run's meshes, whatever those of the checkpoint's were.
            optim_state_dict={"state": optimizer["state"], "param_groups": own["param_groups"]},
            options=_WHOLE,
        )

    def _by_names(self, optimizer: dict[str, Any]) -> dict[str, Any]:
        """State of an optimiser that numbers parameters in their order, by their names."""
        names = [name for name, _ in self.model.named_parameters()]
        return {"state": {names[number]: kept for number, kept in optimizer["state"].items()}}


_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
