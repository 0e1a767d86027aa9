"""The base of plans for torchtitan's pipelines: its order of microbatches, and how long its stages
take beside core attention."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core_attention.pipelining import Pipelining
from core_attention.schedule import Schedule, read_csv
from trainer_client.errors import SessionError
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.pipelines.deferred_weights import defer_weights
from trainer_client.pipelines.pipelining import schedule_of
from trainer_client.pipelines.stage_seconds import MEASURED_TOKENS, measured_pipelining

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The stages of this rank.

    Attributes:
        all: objects of ``torch.distributed.pipelining``, those of lower layers first.
        layers: ``[stages]`` served layers of each.
        ranks_of_stage: ranks of the job that have the same stages: those of pipeline rank 0 come
            first, then those of 1.
        multiple: what the rows of an input must be divided by, without rest.
        hidden: gives hidden states for as many tokens, as stages pass them on.
    """

    all: Sequence[Any]
    layers: Sequence[int]
    ranks_of_stage: int
    multiple: int
    hidden: Callable[[int], torch.Tensor]
    device: torch.device


def order_of(schedule: Any, csv: str | None, n_microbatches: int) -> Schedule | None:
    """The order that torchtitan's pipelines run; None, with a line in the log, if their schedule
    does not say it.

    Args:
        schedule: an object of ``torch.distributed.pipelining``.
        csv: a file with the order, if torchtitan was given one.
        n_microbatches: of a step.

    Raises:
        ScheduleError: the file has no valid order.
        UnsupportedSetting: the order has another number of microbatches.
    """
    try:
        # By its name alone: hosts may keep the file in different places.
        order = read_csv(Path(csv).name, Path(csv).read_text()) if csv else schedule_of(schedule)
    except SessionError as error:
        logger.warning("core attention is spread evenly over all stages: %s", error)
        return None
    if order.n_microbatches != n_microbatches:
        raise UnsupportedSetting(
            f"training.local_batch_size gives {n_microbatches} microbatches, and the order in "
            f"{csv or order.name} has {order.n_microbatches}; make them equal (distca schedule "
            "--microbatches)"
        )
    return order


def pipelining_of(
    order: Schedule, stages: Stages, n_tokens: int, context: Callable[[], Any]
) -> Pipelining:
    """Facts of the pipelines for the session, the same on all ranks, which call it together.

    In orders with backwards in two parts, linear layers are made to put off the gradients of their
    weights: PyTorch's own way leaves weights without gradients that are recomputed or sharded.

    Args:
        n_tokens: of a microbatch.
        context: torchtitan's ``train_context``.
    """
    if order.has_backwards_in_parts:
        for stage in stages.all:
            stage.dw_builder = defer_weights(stage.submod)
    tokens = min(n_tokens, MEASURED_TOKENS // stages.multiple * stages.multiple)
    runs = {
        stage.stage_index: (stage.submod, _alone(stage.submod, stages, tokens))
        for stage in stages.all
    }
    layers = {
        stage.stage_index: layers for stage, layers in zip(stages.all, stages.layers, strict=True)
    }
    with context():
        return measured_pipelining(order, runs, layers, tokens, stages.ranks_of_stage)


def _alone(part: Any, stages: Stages, n_tokens: int) -> Callable[[], torch.Tensor]:
    """A forward of a stage, its head among it."""
    positions = torch.arange(n_tokens, device=stages.device)[None]

    def run() -> torch.Tensor:
        inputs = torch.zeros_like(positions)
        if part.tok_embeddings is None:
            inputs = stages.hidden(n_tokens).requires_grad_()
        skips_head = getattr(part, "_skip_lm_head", False)
        masks = part.get_attention_masks(positions=positions)
        try:
            # A loss in chunks runs the head itself: it belongs to the stage's time all the same.
            part._skip_lm_head = False
            output: torch.Tensor = part(inputs, positions=positions, attention_masks=masks)
        finally:
            part._skip_lm_head = skips_head
        return output

    return run
