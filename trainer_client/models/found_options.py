"""Options of a session that follow from its model, compared with those that are given."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from attention_node.settings import check_device, device_name
from core_attention.shape import AttentionShape
from trainer_client.errors import SessionError
from trainer_client.hooks.tensor_parallel import check_heads, with_group
from trainer_client.models.document_check import attention_modules, check_of


class ServedCall(NamedTuple):
    """A served call of core attention, as far as all of a job are alike."""

    shape: AttentionShape
    scale: float
    device: torch.device


def options_of_model(model: nn.Module, options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with those that follow from the model of transformers in ``model``. The check of
    documents has found them; where weights are sharded, all ranks come together in it.

    With ``serve_windows`` among the options, layers with windows are served, beside full ones.
    """
    given = dict(options)
    windows = given.pop("serve_windows", False)
    refuse_prompts(model)
    check_heads(model)
    checks = {id(c): c for c in map(check_of, attention_modules(model)) if c is not None}
    served = [c for check in checks.values() for c in check.served_calls(windows=windows)]
    if not served:
        raise SessionError(
            f"{type(model).__name__} holds no model of transformers with attn_implementation="
            "'distca'; load it with that, or give n_layers, shape and softmax_scale"
        )
    device = next(model.parameters()).device
    if any(call.kind.window for call in served):
        given["windows"] = [call.kind.window or 0 for call in served]
    calls = [ServedCall(call.shape, call.scale, device) for call in served]
    return with_group(model, options_of_calls(calls, given))


def refuse_prompts(model: nn.Module) -> None:
    """Checks that no adapter of peft in ``model`` puts tokens or keys before its rows."""
    for module in model.modules():
        config: Any = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) is True:
            raise SessionError(
                f"{type(config).__name__} of peft puts {config.num_virtual_tokens} virtual tokens "
                "before every row; use an adapter inside the layers, such as LoRA, or 'with "
                "trainer_client.at_home():'"
            )


def options_of_calls(
    calls: Sequence[ServedCall], options: Mapping[str, Any], *, n_layers: int | None = None
) -> dict[str, Any]:
    """``options`` with those that follow from the served calls of one forward.

    Args:
        calls: in order.
        options: that are given.
        n_layers: if it is not the number of calls.
    """
    first = calls[0]
    if different := next((call for call in calls if call != first), None):
        raise SessionError(
            "all core attention that is served has one shape, dtype and scale, and the model has "
            f"{first} and {different}; give one of them another implementation"
        )
    found = {
        "n_layers": len(calls) if n_layers is None else n_layers,
        "shape": first.shape,
        "softmax_scale": first.scale,
        "device": str(first.device),
    }
    given = {name: value for name, value in options.items() if value is not None}
    for name, value in found.items():
        if name in given and not _agree(given[name], value):
            raise ValueError(
                f"{name} is {given[name]}, and the model has {value}; leave {name} out, or have "
                "the model as it is trained (device, dtype, autocast)"
            )
    return {**found, **given}


def _agree(given: Any, found: Any) -> bool:
    if isinstance(found, float):
        return math.isclose(given, found, rel_tol=1e-6)
    if isinstance(found, str):
        return _numbered(given) == _numbered(found)
    return bool(given == found)


def _numbered(device: str | torch.device) -> str:
    """``device`` with its number: ``"cuda"`` is the current one."""
    device = device_name(device)
    check_device("device", device)
    if torch.device(device).type == "cuda" and torch.device(device).index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return device
