"""``--verify``: the same step with local attention, on the same weights, compared in full.

The comparison shares as little as possible with what it checks: an ordinary transformers model
(``attn_implementation="sdpa"``) runs every document alone and whole, so there is no packing, no
plan and no server in it. It computes in a wider dtype than the run, so what is found is the run's
own error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from distca.apps.report.record import Verification

logger = logging.getLogger(__name__)

WIDER = {"float32": "float64", "bfloat16": "float32"}
"""The dtype of the comparison, by that of the run."""

_TOLERANCES = {
    # 2^-24 = 6e-8 a rounding, a few thousand of them in a sum.
    "float32": (1e-5, 1e-4),
    # 2^-9 = 2e-3 a rounding of activations and gradients, over all layers.
    "bfloat16": (1e-3, 5e-2),
}

_QUIET = 1e-3
"""Differences count relative to a parameter's largest gradient, but to no less than this part of
the largest of all. Where attention is nearly uniform, gradients of queries and keys are a hundred
thousand times smaller than the others and what they are sums of: plain float32 attention is off by
6e-5 of them."""


class Verifier:
    """Recomputes steps with local attention and keeps the largest differences.

    Args:
        model: the same with local attention, in the dtype :data:`WIDER`.
        dtype: of the run.
    """

    def __init__(self, model: nn.Module, dtype: str) -> None:
        self._model = model
        loss_tolerance, gradient_tolerance = _TOLERANCES[dtype]
        self.result = Verification(
            steps=0,
            loss=0.0,
            gradient=0.0,
            parameter="",
            loss_tolerance=loss_tolerance,
            gradient_tolerance=gradient_tolerance,
        )

    def compare(
        self,
        documents: Sequence[torch.Tensor],
        predicted: int,
        loss: float,
        weights: Mapping[str, Any],
        gradients: Iterable[tuple[str, torch.Tensor | None]],
    ) -> None:
        """Compares one step. All ranks call it and keep the same result.

        Args:
            documents: this rank's, ``[tokens]`` each.
            predicted: tokens of all ranks that are predicted.
            loss: of all ranks.
            weights: the whole model's state dict, not updated yet.
            gradients: of all ranks, by the names of parameters.
        """
        self._model.load_state_dict(weights)
        self._model.zero_grad(set_to_none=False)
        local_loss = self._backward(documents, predicted)
        of_loss = abs(loss - local_loss) / abs(local_loss)
        of_gradient, parameter = self._largest_difference(gradients)
        kept = self.result
        if not _worse(of_gradient, kept.gradient) and kept.parameter:
            of_gradient, parameter = kept.gradient, kept.parameter
        self.result = replace(
            kept,
            steps=kept.steps + 1,
            loss=of_loss if _worse(of_loss, kept.loss) else kept.loss,
            gradient=of_gradient,
            parameter=parameter,
        )
        logger.info("verified: loss differs by %.1e, gradients by %.1e", of_loss, of_gradient)

    def _backward(self, documents: Sequence[torch.Tensor], predicted: int) -> float:
        """Leaves the gradients of all ranks in the model and returns the loss of all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        for tokens in documents:
            logits = self._model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
            loss = nn.functional.cross_entropy(logits, tokens[1:], reduction="sum") / predicted
            loss.backward()
            total += loss.detach().cpu()
        dist.all_reduce(total)
        for parameter in self._model.parameters():
            if parameter.grad is None:  # this rank predicts nothing
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return float(total)

    def _largest_difference(
        self, gradients: Iterable[tuple[str, torch.Tensor | None]]
    ) -> tuple[float, str]:
        worst, where = 0.0, ""
        local = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        largest = (float(each.abs().max()) for each in local.values() if each is not None)
        floor = _QUIET * max(largest, default=0.0)
        for name, found in gradients:
            difference = relative_difference(found, local[name], floor=floor)
            if _worse(difference, worst) or not where:
                worst, where = difference, name
        return worst, where


def _worse(one: float, other: float) -> bool:
    """Compares differences, of which NaN is the worst."""
    return not math.isnan(other) and not one <= other


def relative_difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, *, floor: float = 0.0
) -> float:
    """max|found - expected| / max(max|expected|, floor); 0 when both are zero or missing, infinite
    when only one is."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    difference = float((found.to(expected.device).double() - expected.double()).abs().max())
    scale = max(float(expected.double().abs().max()), floor)
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
