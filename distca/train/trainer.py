"""One rank's training: model, optimiser, and the step in which core attention is served."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from distca.data.batch import TokenBatch
from distca.data.packing import PackedStep
from distca.errors import DivergenceError, ModelConfigError
from distca.train.loss import summed_loss
from distca.train.ranks import sum_over_ranks
from distca.train.settings import TrainingSettings
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
    """A model under data-parallel training. All ranks hold equal weights at any time.

    Args:
        model: built with ``attn_implementation="distca"``.
        session: this rank's membership in the job.
        settings: batch and optimiser.
    """

    def __init__(self, model: nn.Module, session: Session, settings: TrainingSettings) -> None:
        self.model = model
        self._session = session
        self._settings = settings
        self._ping_pong = DistributedDataParallel(PingPong(model))
        self._optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=settings.weight_decay,
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
            outputs = self._ping_pong(
                [
                    {"input_ids": b.input_ids, "position_ids": b.position_ids, "use_cache": False}
                    for b in batches
                ]
            )
            losses = [
                summed_loss(output.logits, batch)
                for output, batch in zip(outputs, batches, strict=True)
            ]
            loss = torch.stack(losses).sum() / packed.predicted_tokens
            # DDP averages over the ranks, but each has only its own share of the sum.
            (loss * dist.get_world_size()).backward()
        if not running.complete:
            raise ModelConfigError(
                f"step {packed.step}: the model did not call core attention as often as the job "
                "expects (once a layer and nano-batch, forward and backward); do its layers use "
                "the attention implementation of its config?"
            )
        assert running.report is not None
        (total,) = sum_over_ranks(float(loss.detach()))
        return StepResult(total, running.report, running.trace)

    def update(self, step: int) -> float:
        """Clips the gradients and updates the weights; returns the norm before clipping.

        Raises:
            DivergenceError: the norm is not finite, so the weights would be lost.
        """
        norm = float(
            nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.max_gradient_norm)
        )
        if not math.isfinite(norm):
            raise DivergenceError(
                f"step {step}: the gradients' norm is {norm}; lower --learning-rate"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate_at(step)
        self._optimizer.step()
        return norm

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """State dicts of model and optimiser."""
        return self.model.state_dict(), self._optimizer.state_dict()

    def load_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave."""
        self.model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
