"""Settings of torchtitan that cannot work, found before anything is built."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)

from trainer_client.frameworks.torchtitan.attention import UNBOUNDED, window_of

_BACKENDS = (FlexAttention, ScaledDotProductAttention)

_MICROBATCHES = "arg_mbs"
"""The argument that torchtitan calls ``step`` of a schedule with."""


def problems(config: Any, override: str) -> Iterator[str]:
    """Reasons why ``config`` cannot be trained with served core attention; each says what to do.

    Args:
        config: a ``Trainer.Config``.
        override: the import path of the served attention.
    """
    if config.compile.enable and "model" in config.compile.components:
        yield (
            f"compile.components is {config.compile.components}: layers are compiled with "
            "fullgraph=True, and core attention leaves the graph; set --compile.components loss, "
            "or --compile.no-enable"
        )
    if not config.training.disable_cuda_graphs:
        yield (
            "training.disable_cuda_graphs is False: a CUDA graph cannot hold messages; set "
            "--training.disable_cuda_graphs"
        )
    if config.parallelism.context_parallel_degree > 1:
        yield (
            "parallelism.context_parallel_degree is "
            f"{config.parallelism.context_parallel_degree}: core attention is spread over the "
            "ranks already; set it to 1 and give these ranks to data parallelism"
        )
    yield from pipeline_problems(config.parallelism.pipeline_parallel_degree)
    yield from _attention_problems(config, override)


def pipeline_problems(degree: int) -> Iterator[str]:
    """Reasons why this torch cannot run torchtitan's pipelines of ``degree`` stages."""
    takes = inspect.signature(PipelineScheduleSingle.step).parameters
    if degree > 1 and _MICROBATCHES not in takes:
        yield (
            f"parallelism.pipeline_parallel_degree is {degree}, and schedules of torch "
            f"{torch.__version__} do not take {_MICROBATCHES}; run: pip install 'torch>=2.14'"
        )


def _attention_problems(config: Any, override: str) -> Iterator[str]:
    names = [each if isinstance(each, str) else each[0] for each in config.override.imports]
    if override not in names:
        yield (
            f"override.imports is {names}: nothing puts the served attention in; add "
            f"--override.imports {override}"
        )
    model = config.model_spec.model
    for backend in _BACKENDS:
        if found := [name for name, *_ in model.traverse(backend.Config)]:
            yield (
                f"{_some(found)} of {config.model_spec.name} {config.model_spec.flavor} have "
                f"{backend.__name__}, and VarlenAttention alone is served; choose it by "
                'model_registry(flavor, attn_backend="varlen")'
            )
    layers = list(model.traverse(VarlenAttention.Config))
    if not layers:
        yield (
            f"{config.model_spec.name} {config.model_spec.flavor} has no VarlenAttention, the hook "
            "of served core attention; choose a model of torchtitan's decoder family with "
            'attn_backend="varlen"'
        )
    elif all(window_of(layer) is not None for _, layer, *_ in layers):
        yield (
            f"all {len(layers)} attention layers of {config.model_spec.name} "
            f"{config.model_spec.flavor} have a window (window_size is "
            f"{layers[0][1].window_size}); train it with torchtitan's own trainer"
        )
    yield from _window_problems(model)


def _window_problems(model: Any) -> Iterator[str]:
    """Layers whose window and whose attention say different things."""
    for name, layer, *_ in model.traverse(BaseAttention.Config):
        size = getattr(layer, "sliding_window_size", None)
        inner = layer.inner_attention
        if not isinstance(inner, VarlenAttention.Config):
            continue
        own = window_of(inner)
        if hasattr(layer, "sliding_window_size") and size != own:
            yield (
                f"{name} has sliding_window_size {size}, and its VarlenAttention window_size "
                f"{inner.window_size}, a window of {own or 'all'} tokens; set window_size to "
                f"{(UNBOUNDED if size is None else size - 1, 0)}"
            )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
