"""Hugging Face transformers: importing this module registers ``attn_implementation="distca"``.

The model's core attention is then served, with the documents of the current step's manifest. What
the model hands over is checked against the manifest, and an argument that would change the result
and is not supported raises by name: nothing is silently ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trainer_client.graphs import outside_graphs
from trainer_client.lane import Lane, require_lane
from trainer_client.operation import core_attention
from trainer_client.probe import current_recorder

IMPLEMENTATION = "distca"

_CHECKED = ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k")
_WITHOUT_EFFECT = (
    # Sizes that follow from the documents, and settings of the model's outputs and its loss.
    "max_length_q",
    "max_length_k",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "return_dict",
)
_NEUTRAL: dict[str, Any] = {"is_causal": True, "output_attentions": False, "dropout": 0.0}
"""Arguments that are supported with this one value only (or None)."""


class UnsupportedArgument(ValueError):
    """The model asks for attention that is not supported; names every argument in the way."""


@dataclass(frozen=True)
class _UnsupportedMask:
    """Stands in for a mask that is not plain causal, until attention itself can name it."""

    reason: str

    def __repr__(self) -> str:
        return self.reason


@outside_graphs
def distca_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Core attention of one layer, as transformers calls it.

    Args:
        module: the model's attention module.
        query: ``[1, num_heads, rows, head_dim]``.
        key: ``[1, num_heads_kv, rows, head_dim]``.
        value: ``[1, num_heads_kv, rows, head_dim_v]``.
        attention_mask: None; see :func:`distca_mask`.
        scaling: must be the session's softmax scale.
        dropout: must be 0.
        kwargs: whatever else the model passes; see the module's text.

    Returns:
        o ``[1, rows, num_heads, head_dim_v]`` and no attention weights.

    Raises:
        UnsupportedArgument: an argument is not supported, or has an unsupported value.
        ValueError: position_ids or cu_seq_lens do not match the manifest.
        SessionError: no step is running.
    """
    is_causal = getattr(module, "is_causal", True) and kwargs.pop("is_causal", None) is not False
    _refuse_unsupported(
        {**kwargs, "attention_mask": attention_mask, "dropout": dropout, "is_causal": is_causal}
    )
    if query.shape[0] != 1:
        raise UnsupportedArgument(
            f"query has a batch of {query.shape[0]}; pack the documents of a nano-batch into one "
            "row, [1, rows], with position_ids that restart at 0"
        )
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    if (recorder := current_recorder.get()) is not None:
        return recorder.call(q, k, v, scaling)[None], None
    lane = require_lane()
    _check_scale(lane, scaling, module)
    _check_documents(lane, kwargs)
    return core_attention(q, k, v)[None], None


@outside_graphs
def distca_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> _UnsupportedMask | None:
    """The mask that transformers hands to :func:`distca_attention`: None if it is plain causal.

    The documents come from the manifest, so nothing is materialised. A mask that hides more, or
    less, than causal attention within documents comes back as an object that the attention refuses
    by name.
    """
    if attention_mask is not None and not bool(attention_mask.all()):
        return _UnsupportedMask("padding (remove padding and pack documents instead)")
    if kwargs.get("use_vmap"):
        return _UnsupportedMask("a custom mask function")
    if q_length != kv_length or q_offset or kv_offset:
        return _UnsupportedMask(f"a cache ({q_length} queries, {kv_length} keys)")
    if current_recorder.get() is not None:
        return None
    lane = require_lane()
    if mask_function is not None and not _is_causal_within_segments(lane, mask_function):
        return _UnsupportedMask("not causal (sliding window, chunked or bidirectional)")
    return None


def _is_causal_within_segments(lane: Lane, mask_function: Callable[..., Any]) -> bool:
    """Asks the mask at its borders: each row must see the first row of its segment and itself,
    and must not see the next row."""
    segments = torch.tensor(lane.running.segments(lane.nano_batch), dtype=torch.int64)
    begin, _, length = segments.reshape(-1, 3).unbind(1)
    first = begin.repeat_interleave(length)
    rows = torch.arange(len(first))
    zero = torch.zeros((), dtype=torch.int64)
    sees_first = torch.as_tensor(mask_function(zero, zero, rows, first))
    sees_itself = torch.as_tensor(mask_function(zero, zero, rows, rows))
    sees_next = torch.as_tensor(mask_function(zero, zero, rows[:-1], rows[1:]))
    # One question to the device, which the mask may be on.
    return bool(sees_first.all() & sees_itself.all() & ~sees_next.any())


def _refuse_unsupported(arguments: dict[str, Any]) -> None:
    refused = {
        name: value
        for name, value in arguments.items()
        if value is not None
        and name not in _CHECKED
        and name not in _WITHOUT_EFFECT
        and not (name in _NEUTRAL and value == _NEUTRAL[name])
    }
    if refused:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in sorted(refused.items()))
        raise UnsupportedArgument(
            f"attn_implementation='distca' does not support {shown}; it computes causal attention "
            "within documents, without dropout. Turn the feature off in the model's config, or "
            "use another implementation"
        )


def _short(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_scale(lane: Lane, scaling: float | None, module: nn.Module) -> None:
    scale = lane.running.job.scale
    if scaling is not None and abs(scaling - scale) > 1e-6 * scale:
        raise UnsupportedArgument(
            f"{type(module).__name__} scales by {scaling}, the session by {scale}; open the "
            f"session with softmax_scale={scaling}"
        )


def _check_documents(lane: Lane, arguments: dict[str, Any]) -> None:
    """position_ids or cu_seq_lens must tell of the documents that were planned."""
    running, nano_batch = lane.running, lane.nano_batch
    where = f"step {running.step} nano-batch {nano_batch}"
    position_ids = arguments.get("position_ids")
    if position_ids is not None and not running.verified(nano_batch, position_ids):
        expected = running.positions[nano_batch]
        if position_ids.dim() > 2 or position_ids.numel() != expected.numel():
            raise ValueError(
                f"{where}: position_ids have shape {tuple(position_ids.shape)}, the manifest "
                f"{expected.numel()} rows; give [1, rows] (3-D ids are not supported)"
            )
        wrong = (position_ids.flatten().cpu() != expected).nonzero()
        if wrong.numel():
            at = int(wrong[0])
            raise ValueError(
                f"{where}: position_ids say {int(position_ids.flatten()[at])} at row {at}, the "
                f"manifest {int(expected[at])}; submit the manifest of the batch that is run"
            )
        running.mark_verified(nano_batch, position_ids)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        cumulative = arguments.get(name)
        if cumulative is None or running.verified(nano_batch, cumulative):
            continue
        lengths = [length for _, _, length in running.segments(nano_batch)]
        if cumulative.flatten().diff().tolist() != lengths:
            raise ValueError(
                f"{where}: {name} tell of lengths {cumulative.diff().tolist()[:8]}..., the "
                f"manifest of {lengths[:8]}...; submit the manifest of the batch that is run"
            )
        running.mark_verified(nano_batch, cumulative)


AttentionInterface.register(IMPLEMENTATION, distca_attention)
AttentionMaskInterface.register(IMPLEMENTATION, distca_mask)
