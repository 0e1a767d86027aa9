"""Tensor parallelism by the plan that a model of transformers brings, applied by PyTorch.

The projections of layers are spread over the ranks, which then have their share of the heads.
Embedding, head and normalisations are whole on every rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PretrainedConfig, PreTrainedModel

from distca.errors import ModelConfigError
from trainer_client.models.document_check import computed_here, current_check

_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""By the names that transformers gives them."""

_PARTIAL = "replicated_with_grad_allreduce"
"""Weights that every rank has, and uses on its own heads: normalisations of queries and keys."""

_WHOLE = ("embedding_rowwise", "embedding_colwise", "replicate")
"""What may as well stay whole."""

_TRIED_TOKENS = 4
_TOLERANCE = 1e-3
"""Largest difference of hidden states, relative to the largest, that other sums may make: some
thousand float32 roundings. Heads that are mixed up are off by as much as they are large."""


def check_plan(config: PretrainedConfig, n_ranks: int) -> None:
    """Checks what can be said of a model type without other ranks.

    Raises:
        ModelConfigError: it has no plan, or one that asks for what is not supported.
    """
    if n_ranks > 1:
        _plan_of(config)


class TensorParallel:
    """Spreads a model over the ranks of ``mesh``; all of them make it together.

    Args:
        model: whole, with equal weights on all ranks; it is changed in place.
        mesh: of one dimension.

    Raises:
        ModelConfigError: the model has no plan, or gives other hidden states so.
    """

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        # Not their parameters, which fully_shard replaces.
        self._partial: list[nn.Module] = []
        plan = _plan_of(model.config)
        with _noise_for_zeros(model):
            expected, whole = _run(model)
            self._spread(model.base_model, plan)
            try:
                found, shared = _run(model)
            except (RuntimeError, ValueError) as error:
                raise _cannot(model.config, f"a forward fails: {error}") from error
        if float((found - expected).abs().max()) > _TOLERANCE * float(expected.abs().max()):
            raise _cannot(model.config, "it gives other hidden states")
        if [heads * mesh.size() for heads in shared] != whole:
            raise _cannot(
                model.config,
                f"its plan does not share heads: layers call attention with {shared} heads on a "
                f"rank, and with {whole} if they are whole",
            )

    def _spread(self, base: nn.Module, plan: Mapping[re.Pattern[str], str]) -> None:
        for name, module in list(base.named_modules()):
            style = next((style for rule, style in plan.items() if rule.fullmatch(name)), "")
            if style == _PARTIAL:
                self._partial.append(module)
            elif style in _STYLES:
                # Every rank has the weights: nothing is sent.
                parallelize_module(module, self._mesh, _STYLES[style](), src_data_rank=None)

    def share_gradients(self) -> None:
        """Sums gradients of weights that every rank has used on its own heads; all ranks call it,
        once after each backward pass."""
        for parameter in chain.from_iterable(map(nn.Module.parameters, self._partial)):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self._mesh.get_group())


@contextmanager
def _noise_for_zeros(model: nn.Module) -> Iterator[None]:
    """New biases are zero, and would hide what is done to them: for the block they are small
    random numbers, the same on all ranks."""
    zeros = [name for name, parameter in model.named_parameters() if not bool(parameter.any())]
    for name in zeros:
        parameter = model.get_parameter(name)
        generator = torch.Generator(parameter.device).manual_seed(0)
        parameter.data.normal_(std=0.02, generator=generator)
    try:
        yield
    finally:
        for name in zeros:
            parameter = model.get_parameter(name)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.detach().zero_()


def _run(model: PreTrainedModel) -> tuple[torch.Tensor, list[int]]:
    """Hidden states of a few tokens, and the heads of each call of attention."""
    ids = torch.arange(_TRIED_TOKENS, device=model.device)[None]
    base = model.base_model
    with torch.no_grad(), computed_here(model, _TRIED_TOKENS):
        output = base(input_ids=ids, position_ids=ids, use_cache=False)
        check = current_check.get()
        assert check is not None
        heads = [call.num_heads for call in check.calls]
    return output.last_hidden_state, heads


def _plan_of(config: PretrainedConfig) -> dict[re.Pattern[str], str]:
    """By names of modules in the base model."""
    plan = config.get_text_config().base_model_tp_plan
    if not plan:
        raise _cannot(config, "it has no base_model_tp_plan in transformers")
    known = {*_STYLES, _PARTIAL, *_WHOLE}
    unknown = {name: style for name, style in plan.items() if style not in known}
    if unknown:
        shown = ", ".join(f"{name} is {style}" for name, style in sorted(unknown.items()))
        raise _cannot(config, f"its plan has styles besides columns and rows ({shown})")
    return {
        re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()
    }


def _cannot(config: PretrainedConfig, why: str) -> ModelConfigError:
    return ModelConfigError(
        f"model type {config.model_type!r} cannot be trained with --tensor-parallel: {why}; leave "
        "the option out, or choose another model type"
    )
