"""What cannot work, found in a configuration of torchtitan before anything is built."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
)

_BACKENDS = (FlexAttention, ScaledDotProductAttention)


def problems(config: Any, override: str) -> Iterator[str]:
    """Why ``config`` cannot be trained with served core attention; each says what to do.

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
    if config.validator.enable:
        yield (
            "validator.enable is True: validation runs the model outside of planned steps; set "
            "--validator.no-enable, and evaluate checkpoints apart"
        )
    yield from _attention_problems(config, override)


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
    if not any(model.traverse(VarlenAttention.Config)):
        yield (
            f"{config.model_spec.name} {config.model_spec.flavor} has no VarlenAttention, the hook "
            "of served core attention; choose a model of torchtitan's decoder family with "
            'attn_backend="varlen"'
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:2])
    return shown if len(names) <= 2 else f"{shown} and {len(names) - 2} more"
