"""The base of plans for torchtitan's pipelines: its order of microbatches, and how long its stages
take beside core attention."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from core_attention.schedule import Schedule, read_csv
from trainer_client.errors import SessionError
from trainer_client.frameworks.versions import UnsupportedSetting
from trainer_client.pipelines.pipelining import schedule_of

logger = logging.getLogger(__name__)


def order_of(schedule: Any, csv: str | None, n_microbatches: int) -> Schedule | None:
    """The order that torchtitan's pipelines run; None, with a line in the log, if their schedule
    does not say it.

    Args:
        schedule: an object of ``torch.distributed.pipelining``.
        csv: a file with the order, if torchtitan was given one.
        n_microbatches: of a step.
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


def timed_run(
    part: Any, n_tokens: int, device: torch.device, hidden: Callable[[int], torch.Tensor]
) -> Callable[[], torch.Tensor]:
    """A forward of a stage, its head among it.

    Args:
        hidden: gives hidden states for as many tokens, as stages pass them on.
    """
    positions = torch.arange(n_tokens, device=device)[None]

    def run() -> torch.Tensor:
        inputs = torch.zeros_like(positions)
        if part.tok_embeddings is None:
            inputs = hidden(n_tokens).requires_grad_()
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
