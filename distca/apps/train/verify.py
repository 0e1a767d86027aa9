"""``--verify``: the same step with local attention, on the same weights, compared in full.

The comparison shares as little as possible with what it checks: an ordinary transformers model
(``attn_implementation="sdpa"``) runs every document alone and whole, so there is no packing, no
ping-pong, no plan and no server in it. It computes in a wider dtype than the run, so what is found
is the run's own error.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from distca.apps.data.batch import whole_documents
from distca.apps.data.corpus import Corpus
from distca.apps.data.packing import PackedStep
from distca.apps.report.record import Verification
from distca.apps.train.loss import summed_loss
from distca.apps.train.model import build_model
from distca.errors import ModelConfigError

logger = logging.getLogger(__name__)

_TOLERANCES = {
    # 2^-24 = 6e-8 a rounding, a few thousand of them in a sum.
    "float32": (1e-5, 1e-4),
    # 2^-9 = 2e-3 a rounding of activations and gradients, over all layers.
    "bfloat16": (1e-3, 5e-2),
}

_WIDER = {"float32": "float64", "bfloat16": "float32"}


def _check_draws_nothing(config: PretrainedConfig) -> None:
    """The comparison runs every document alone, and would draw other masks."""
    drawn = {
        name: value
        for name, value in config.to_dict().items()
        if "drop" in name
        and isinstance(value, float)
        and value > 0
        # Of heads that a language model does not have.
        and not name.startswith(("summary_", "classifier_"))
    }
    if drawn:
        shown = ", ".join(f"{name}={value}" for name, value in sorted(drawn.items()))
        raise ModelConfigError(
            f"--verify compares with a model that draws other random numbers, and the model has "
            f"{shown}; set them to 0, or leave --verify out"
        )


_QUIET = 1e-3
"""Differences count relative to a parameter's largest gradient, but to no less than this part of
the largest of all. Where attention is nearly uniform, gradients of queries and keys are a hundred
thousand times smaller than the others and what they are sums of: plain float32 attention is off by
6e-5 of them."""


class Verifier:
    """Recomputes steps with local attention and keeps the largest differences.

    Args:
        config: of the model.
        dtype: of its weights; the comparison is made in a wider one.
        corpus: to read whole documents from.
        rank: it recomputes the documents that begin on this one.
        device: where it does so.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: str,
        corpus: Corpus,
        rank: int,
        device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
    ) -> None:
        _check_draws_nothing(config)
        self._model = build_model(
            config, attention="sdpa", dtype=_WIDER[dtype], seed=0, device=device
        )
        self._device = device
        self._corpus = corpus
        self._rank = rank
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
        packed: PackedStep,
        loss: float,
        weights: Mapping[str, Any],
        gradients: Iterable[tuple[str, torch.Tensor | None]],
    ) -> None:
        """Compares one step with local attention. All ranks call it and keep the same result.

        Args:
            packed: the step.
            loss: of all ranks.
            weights: the whole model's state dict, not updated yet.
            gradients: of all ranks, by the names of parameters.
        """
        self._model.load_state_dict(weights)
        self._model.zero_grad(set_to_none=False)
        local_loss = self._backward(packed)
        of_loss = abs(loss - local_loss) / abs(local_loss)
        of_gradient, parameter = self._largest_gradient_difference(gradients)
        self._keep(of_loss, of_gradient, parameter)
        logger.info(
            "step %d verified: loss differs by %.1e, gradients by %.1e (%s)",
            packed.step,
            of_loss,
            of_gradient,
            parameter,
        )

    def _backward(self, packed: PackedStep) -> float:
        """Leaves the gradients of all ranks in the model and returns the loss of all ranks."""
        total = torch.zeros((), dtype=torch.float64)
        for document in whole_documents(packed, self._corpus, self._rank):
            batch = document.to(self._device)
            output = self._model(
                input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False
            )
            loss = summed_loss(output.logits, batch) / packed.predicted_tokens
            loss.backward()
            total += loss.detach().double().cpu()
        dist.all_reduce(total)
        for parameter in self._model.parameters():
            if parameter.grad is None:  # this rank has no document
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        return float(total)

    def _largest_gradient_difference(
        self, gradients: Iterable[tuple[str, torch.Tensor | None]]
    ) -> tuple[float, str]:
        worst, where = 0.0, ""
        local = {name: parameter.grad for name, parameter in self._model.named_parameters()}
        largest = (float(each.abs().max()) for each in local.values() if each is not None)
        floor = _QUIET * max(largest, default=0.0)
        for name, found in gradients:
            expected = local[name]
            if found is not None and expected is not None:
                found = found.to(expected.device)
            difference = relative_difference(found, expected, floor=floor)
            # Written so that a NaN is the worst of all.
            if not difference <= worst or not where:
                worst, where = difference, name
                if difference != difference:
                    break
        return worst, where

    def _keep(self, loss: float, gradient: float, parameter: str) -> None:
        kept = self.result
        # Comparisons are written so that a NaN is the worst of all.
        worse = not gradient <= kept.gradient or not kept.parameter
        self.result = replace(
            kept,
            steps=kept.steps + 1,
            loss=loss if not loss <= kept.loss else kept.loss,
            gradient=gradient if worse else kept.gradient,
            parameter=parameter if worse else kept.parameter,
        )


def relative_difference(
    found: torch.Tensor | None, expected: torch.Tensor | None, *, floor: float = 0.0
) -> float:
    """max|found - expected| / max(max|expected|, floor); 0 when both are zero or missing, infinite
    when only ``expected`` is."""
    if found is None or expected is None:
        return 0.0 if found is expected else float("inf")
    difference = float((found.double() - expected.double()).abs().max())
    scale = max(float(expected.double().abs().max()), floor)
    if scale == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / scale
