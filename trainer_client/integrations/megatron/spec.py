"""Layer specs of Megatron-core whose core attention is served."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from trainer_client.integrations.frameworks import UnsupportedSetting
from trainer_client.integrations.megatron.attention import ServedCoreAttention

_HOOK = "core_attention"


def serve(spec: Any) -> Any:
    """A copy of ``spec`` in which every core attention is :class:`ServedCoreAttention`.

    Args:
        spec: a ``ModuleSpec`` of a layer, a block's submodules (one spec a layer), or a stack of a
            hybrid model, from Megatron-core or of your own.

    Raises:
        UnsupportedSetting: it has no core attention.
    """
    made = copy.deepcopy(spec)
    hooks = list(_hooks(made))
    if not hooks:
        raise UnsupportedSetting(
            f"{type(spec).__name__} has no submodules with {_HOOK}, the hook of served core "
            "attention; give the spec of a model with softmax attention, such as "
            "get_gpt_layer_local_spec() or get_gpt_layer_with_transformer_engine_spec() returns"
        )
    for submodules in hooks:
        setattr(submodules, _HOOK, ServedCoreAttention)
    return made


def _hooks(part: Any) -> Iterator[Any]:
    """The submodules in ``part`` that name a core attention."""
    if isinstance(part, list | tuple):
        for each in part:
            yield from _hooks(each)
    elif is_dataclass(part) and not isinstance(part, type):
        if getattr(part, _HOOK, None) is not None:
            yield part
        for field in fields(part):
            if field.name != _HOOK:
                yield from _hooks(getattr(part, field.name))
