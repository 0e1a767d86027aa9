"""Gradients of weights computed apart from those of inputs (Zero Bubble, arXiv 2401.10241).

A stage of a pipeline that sends its inputs' gradients before it computes its weights' lets the
stage below begin earlier. PyTorch's own backward in two parts walks the autograd graph twice: it
knows no recomputed layers, no compiled functions and no weights that are freed in between. Here the
graph is walked once, as ever, and linear layers put off the product that their weight needs. All
other gradients, such as those of norms, embeddings and biases, are computed in the first part.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer_client.errors import SessionError
from trainer_client.hooks.compile_boundary import outside_graphs


class _Product(NamedTuple):
    """The factors of the gradient of a weight ``[n_out, n_in]``: ``do.T @ x`` over all rows.

    Attributes:
        weight: which.
        x: ``[..., n_in]``.
        do: ``[..., n_out]``.
    """

    weight: nn.Parameter
    x: torch.Tensor
    do: torch.Tensor


class DeferredWeights:
    """The products that the linear layers of a stage have put off; see :func:`defer_weights`."""

    def __init__(self) -> None:
        self._is_deferring = False
        self._products: deque[_Product] = deque()

    def __call__(self) -> Callable[[], None]:
        """A function that adds the gradients put off since the last call to ``.grad``.
        ``PipelineStage`` calls it after each backward, and the result in the second part."""
        products, self._products = self._products, deque()
        return partial(_accumulate, products)

    def watch(self, stage: Any) -> None:
        """Has products put off in backwards of ``stage`` that are one of two parts, and only there:
        ``backward_one_chunk`` is replaced on the object. ``Pipeline`` calls it.
        """
        _refuse_replicated(stage.submod)
        backward = stage.backward_one_chunk

        @functools.wraps(backward)
        def backward_one_chunk(
            bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, **options: Any
        ) -> Any:
            self._is_deferring = not full_backward
            try:
                return backward(bwd_chunk_id, loss=loss, full_backward=full_backward, **options)
            finally:
                self._is_deferring = False

        stage.backward_one_chunk = backward_one_chunk

    def takes(self, weight: nn.Parameter, x: torch.Tensor, do: torch.Tensor) -> bool:
        """Return whether the gradient of ``weight``, ``do.T @ x`` over all rows, is put off."""
        if self._is_deferring:
            self._products.append(_Product(weight, x, do))
        return self._is_deferring


def defer_weights(module: nn.Module) -> DeferredWeights:
    """Has the linear layers of a stage put off their weights' gradients, where the schedule has
    backwards in two parts.

    ::

        stage = PipelineStage(module, ..., dw_builder=defer_weights(module))

    ``forward`` of each ``torch.nn.Linear`` is replaced on the object, unless somebody else has done
    so. Subclasses with a ``forward`` of their own and layers of other kinds are left alone, as are
    layers under autocast and weights that are DTensors (of tensor parallelism), have hooks, or are
    computed from others (``weight_norm``): their gradients are computed in the first part. Layers
    may be recomputed, compiled (what is around a linear layer, then) and sharded by FSDP2. Between
    both parts, a linear layer keeps its input and its output's gradient.

    Args:
        module: of the stage.
    """
    _refuse_replicated(module)
    deferred = DeferredWeights()
    for part in module.modules():
        if not isinstance(part, nn.Linear) or "forward" in vars(part):
            continue
        if type(part).forward is nn.Linear.forward:
            forward: Any = outside_graphs(partial(_linear, part, deferred))
            part.forward = forward  # type: ignore[method-assign]
    return deferred


def _refuse_replicated(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise SessionError(
                f"{name or type(part).__name__!r} is a DistributedDataParallel, which would miss "
                "gradients that are put off; use fully_shard, or reduce gradients after the step"
            )


def _linear(layer: nn.Linear, deferred: DeferredWeights, x: torch.Tensor) -> torch.Tensor:
    weight, bias = layer.weight, layer.bias
    is_cast = torch.is_autocast_enabled(x.device.type)
    is_special = is_cast or isinstance(x, DTensor) or not _may_wait(weight)
    if is_special or not torch.is_grad_enabled():
        return nn.functional.linear(x, weight, bias)
    y: torch.Tensor = _Linear.apply(x, weight, bias, deferred)  # type: ignore[no-untyped-call]
    return y


def _may_wait(weight: torch.Tensor) -> bool:
    """Return whether all that becomes of the gradient of ``weight`` is that it is in ``.grad``."""
    if isinstance(weight, DTensor) or not (weight.requires_grad and weight.is_leaf):
        return False
    return not (weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None))


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: nn.Parameter,
        bias: torch.Tensor | None,
        deferred: DeferredWeights,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.deferred = weight, deferred
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_bias, _ = ctx.needs_input_grad
        dx = do @ weight if needs_x else None
        dbias = _rows(do).sum(dim=0) if needs_bias else None
        if ctx.deferred.takes(ctx.weight, x, do):
            return dx, None, dbias, None
        return dx, _rows(do).t() @ _rows(x), dbias, None


@torch.no_grad()
def _accumulate(products: deque[_Product]) -> None:
    while products:
        weight, x, do = products.popleft()
        if weight.grad is None:
            weight.grad = _rows(do).t() @ _rows(x)
        else:
            weight.grad.addmm_(_rows(do).t(), _rows(x))


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1, tensor.shape[-1])
