"""Layer specs of Megatron-core whose core attention is served."""

from __future__ import annotations

import copy
import dataclasses
import logging
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.spec_utils import ModuleSpec

from trainer_client.frameworks.megatron.attention import ServedCoreAttention
from trainer_client.frameworks.versions import UnsupportedSetting

logger = logging.getLogger(__name__)

_HOOK = "core_attention"

_SERVED = (DotProductAttention, TEDotProductAttention, ServedCoreAttention)
"""The kinds that servers compute: softmax over all keys of a document up to the query's own."""


def serve(spec: Any) -> Any:
    """A copy of ``spec`` in which softmax attention is :class:`ServedCoreAttention`.

    What has no core attention (Mamba, gated delta net, MLP, experts) stays as it is, and so does
    core attention of another kind, such as ``DSAttention``: the model computes it itself.

    Args:
        spec: a ``ModuleSpec`` of a layer, a block's submodules (one spec a layer), or a stack of a
            hybrid model (``MambaStack``, ``HybridStack``), from Megatron-core or of your own.
    """
    hooks: list[Any] = []
    made = _copied(spec, hooks)
    if not hooks:
        raise UnsupportedSetting(
            f"{type(spec).__name__} has no submodules with {_HOOK}; give the spec of a model with "
            "softmax attention, such as get_gpt_layer_local_spec() returns"
        )
    served = [part for part in hooks if _kind(part.core_attention) in _SERVED]
    kinds = {_name(part.core_attention): _kind(part.core_attention) for part in hooks}
    others = sorted(name for name, kind in kinds.items() if kind not in _SERVED)
    if not served:
        raise UnsupportedSetting(
            f"core attention of {type(spec).__name__} is {', '.join(others)}, which is not served: "
            "DotProductAttention and TEDotProductAttention are; train it with Megatron's own loop"
        )
    if others:
        logger.info("layers with %s compute core attention themselves", ", ".join(others))
    for part in served:
        part.core_attention = _in_place_of(part.core_attention)
    return made


def _kind(core: Any) -> Any:
    """The class of a core attention in a spec."""
    return core.module if isinstance(core, ModuleSpec) else core


def _name(core: Any) -> str:
    kind = _kind(core)
    return getattr(kind, "__name__", None) or repr(kind)


def _in_place_of(core: Any) -> Any:
    if isinstance(core, ModuleSpec):
        return dataclasses.replace(core, module=ServedCoreAttention)
    return ServedCoreAttention


def _copied(part: Any, hooks: list[Any]) -> Any:
    """A copy of ``part`` of a spec; its submodules that name a core attention go to ``hooks``.

    Modules stay the same objects: those of TransformerEngine, where it is not installed, are mocks,
    which cannot be copied.
    """
    if isinstance(part, list | tuple):
        return type(part)(_copied(each, hooks) for each in part)
    if isinstance(part, dict):
        return {name: _copied(each, hooks) for name, each in part.items()}
    if not dataclasses.is_dataclass(part) or isinstance(part, type):
        return part
    made = copy.copy(part)
    if getattr(made, _HOOK, None) is not None:
        hooks.append(made)
    for field in dataclasses.fields(made):
        if field.name != _HOOK:
            setattr(made, field.name, _copied(getattr(part, field.name), hooks))
    return made
