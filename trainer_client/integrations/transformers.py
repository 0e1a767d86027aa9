"""Hugging Face transformers: importing this module registers ``attn_implementation="distca"``.

The model's core attention is then served, with the documents of the current step's manifest. What
the model hands over is checked against the manifest, and an argument that would change the result
and is not supported raises by name: nothing is silently ignored.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from trainer_client.integrations.at_home import (
    HomeMask,
    attend_at_home,
    document_lengths,
    is_at_home,
)
from trainer_client.integrations.checkpointing import Checkpoints
from trainer_client.integrations.document_check import (
    IMPLEMENTATION,
    UnsupportedArgument,
    UnsupportedModel,
    check_documents,
    check_of,
    current_check,
    has_attention_interface,
    hook_before_forward,
    no_interface,
)
from trainer_client.integrations.documents import CHECKED, Documents, documents_of
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.probe import current_recorder
from trainer_client.integrations.shape_inference import is_shape_inference, of_the_right_shape
from trainer_client.step.lane import Lane, require_lane
from trainer_client.step.operation import core_attention

__all__ = [
    "IMPLEMENTATION",
    "UnsupportedArgument",
    "UnsupportedModel",
    "check_documents",
    "distca_attention",
    "distca_mask",
]

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

_NOT_PLANNED = Documents("the probe", [])
"""In a probe only shapes are asked for."""

_WINDOWS = ("sliding_window",)
"""Arguments that hide keys further away than so many tokens: no change for shorter documents."""


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
    checkpoints = Checkpoints()
    if is_shape_inference(checkpoints.recomputed):
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return of_the_right_shape(q, k, v, checkpoints), None
    if current_check.get() is None and is_at_home():
        return _at_home(module, query, key, value, attention_mask, scaling, dropout, kwargs), None
    recorder = current_recorder.get()
    documents = _NOT_PLANNED if recorder else _documents()
    is_causal = getattr(module, "is_causal", True) and kwargs.pop("is_causal", None) is not False
    _refuse_unsupported(
        {**kwargs, "attention_mask": attention_mask, "dropout": dropout, "is_causal": is_causal},
        documents,
    )
    if query.shape[0] != 1:
        raise UnsupportedArgument(
            f"query has a batch of {query.shape[0]}; pack the documents of a nano-batch into one "
            "row, [1, rows], with position_ids that restart at 0"
        )
    query, key, value = _cast(module, query, key, value)
    if recorder is not None:
        q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
        return recorder.call(q, k, v, scaling)[None], None
    documents.check(kwargs)
    if (check := current_check.get()) is not None:
        return check.attend(module, query, key, value, scaling), None
    lane = require_lane()
    _refuse_unproven(module, documents)
    _check_scale(lane, scaling, module)
    _check_dtype(lane, query)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
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
) -> _UnsupportedMask | HomeMask | None:
    """The mask that transformers hands to :func:`distca_attention`: None if it is plain causal.

    The documents come from the manifest, so nothing is materialised. A mask that hides more, or
    less, than causal attention within documents comes back as an object that the attention refuses
    by name.
    """
    if current_check.get() is None and is_at_home():
        asked = {
            "batch_size": batch_size,
            "q_length": q_length,
            "kv_length": kv_length,
            "q_offset": q_offset,
            "kv_offset": kv_offset,
            "attention_mask": attention_mask,
            **({"mask_function": mask_function} if mask_function else {}),
        }
        return HomeMask({**asked, **kwargs})
    if attention_mask is not None and not bool(attention_mask.all()):
        return _UnsupportedMask("padding (remove padding and pack documents instead)")
    if kwargs.get("use_vmap"):
        return _UnsupportedMask("a custom mask function")
    if q_length != kv_length or q_offset or kv_offset:
        return _UnsupportedMask(f"a cache ({q_length} queries, {kv_length} keys)")
    if mask_function is None or current_recorder.get() is not None:
        return None
    if is_shape_inference(Checkpoints().recomputed):
        return None
    documents = _documents()
    window = kwargs.get("local_size")
    if window is not None and window < documents.longest:
        return _UnsupportedMask(
            f"a window or chunk of {window} tokens, shorter than the longest document of "
            f"{documents.where} with {documents.longest} tokens"
        )
    if not _is_causal_within_segments(documents, mask_function, reaches_back=window is None):
        return _UnsupportedMask("not causal (bidirectional, or of the model's own kind)")
    return None


def _at_home(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention of rows that nobody has planned; what no mask tells is refused as ever."""
    told = {name: value for name, value in kwargs.items() if name not in (*_WINDOWS, "is_causal")}
    _refuse_unsupported(told, _NOT_PLANNED)
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedArgument(
            f"{type(module).__name__} asks for attention that is not causal; attn_implementation="
            "'distca' computes causal attention only, at home as well"
        )
    query, key, value = _cast(module, query, key, value)
    lengths, positions = None, kwargs.get("position_ids")
    if positions is not None and query.shape[0] == 1 and query.shape[2] == key.shape[2]:
        if mask is None:
            lengths = document_lengths(positions)
        elif isinstance(mask, HomeMask) and mask.follows_documents:
            if id(positions) not in mask.known_lengths:
                mask.known_lengths[id(positions)] = positions, _lengths_at_home(mask, positions)
            lengths = mask.known_lengths[id(positions)][1]
    return attend_at_home(module, query, key, value, mask, scaling, dropout, lengths)


def _lengths_at_home(mask: HomeMask, positions: torch.Tensor) -> list[int] | None:
    """Of the documents, if ``mask`` hides later keys and other documents and nothing else."""
    lengths = document_lengths(positions) if positions.shape[-1] == mask.asked["q_length"] else None
    function = mask.asked.get("mask_function")
    if lengths is None or function is None:
        return lengths
    begins = [0, *itertools.accumulate(lengths[:-1])]
    documents = Documents("at home", [(b, 0, n) for b, n in zip(begins, lengths, strict=True)])
    return lengths if _is_causal_within_segments(documents, function, reaches_back=True) else None


def _documents() -> Documents:
    """Of the check that runs, or else of the lane."""
    check = current_check.get()
    return documents_of(require_lane()) if check is None else check.documents


def _is_causal_within_segments(
    documents: Documents, mask_function: Callable[..., Any], *, reaches_back: bool
) -> bool:
    """Asks the mask at its borders: each row must see itself, must not see the next row and, if it
    ``reaches_back``, must see the first row of its segment. (Chunks are counted from the first row
    if transformers does not see that documents are packed; they are not longer than a chunk.)"""
    segments = torch.tensor(documents.segments, dtype=torch.int64)
    begin, _, length = segments.reshape(-1, 3).unbind(1)
    first = begin.repeat_interleave(length)
    rows = torch.arange(len(first))
    zero = torch.zeros((), dtype=torch.int64)
    sees_itself = torch.as_tensor(mask_function(zero, zero, rows, rows))
    sees_next = torch.as_tensor(mask_function(zero, zero, rows[:-1], rows[1:]))
    sees_first = torch.as_tensor(mask_function(zero, zero, rows, first))
    reached = sees_first.all() if reaches_back else sees_itself.all()
    # One question to the device, which the mask may be on.
    return bool(reached & sees_itself.all() & ~sees_next.any())


def _refuse_unsupported(arguments: dict[str, Any], documents: Documents) -> None:
    refused = {
        name: value
        for name, value in arguments.items()
        if value is not None
        and name not in CHECKED
        and name not in _WITHOUT_EFFECT
        and not (name in _NEUTRAL and value == _NEUTRAL[name])
        and not (name in _WINDOWS and _is_wide(value, documents))
    }
    if refused:
        shown = ", ".join(
            f"{name}={_short(value)}"
            + (f" (the longest document has {documents.longest} tokens)" * (name in _WINDOWS))
            for name, value in sorted(refused.items())
        )
        raise UnsupportedArgument(
            f"attn_implementation='distca' does not support {shown}; it computes causal attention "
            "within documents, without dropout. Turn the feature off in the model's config, or "
            "use another implementation"
        )


def _is_wide(window: Any, documents: Documents) -> bool:
    """Whether a window hides nothing of any document."""
    return isinstance(window, int) and window >= documents.longest


def _short(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_scale(lane: Lane, scaling: float | None, module: nn.Module) -> None:
    scale = lane.running.job.scale
    if scaling is not None and abs(scaling - scale) > 1e-6 * scale:
        raise UnsupportedArgument(
            f"{type(module).__name__} scales by {scaling}, the session by {scale}; open the "
            f"session with softmax_scale={scaling}"
        )


def _refuse_unproven(module: nn.Module, documents: Documents) -> None:
    check = check_of(module)
    if check is None:
        raise UnsupportedModel(
            f"nothing shows that the model of this {type(module).__name__} keeps documents apart: "
            "its weights were sharded before its first step, or its attention modules were put in "
            "later. Call trainer_client.integrations.transformers."
            "check_documents(model) before it is sharded (or on all ranks together) and before "
            "its first step"
        )
    if check.fault and not documents.is_one_from_its_start:
        raise UnsupportedModel(
            f"{documents.where} holds segments of lengths {documents.lengths[:8]}, and the model "
            f"of {type(module).__name__} can have one whole document in a nano-batch only: "
            f"{check.fault}. Give each nano-batch one document that is whole on its rank"
        )
    if missing := sorted(check.needs - documents.told):
        raise UnsupportedArgument(
            f"{documents.where}: the model of {type(module).__name__} was called without "
            f"{', '.join(missing)}, so that its documents cannot be compared with the manifest; "
            "call it with position_ids that restart at 0 in every document"
            + (f", and with {', '.join(missing)}" if missing != ["position_ids"] else "")
        )


def _cast(module: nn.Module, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """As ``scaled_dot_product_attention`` does: under autocast all in its dtype, but for float64.
    Gradients come back in the tensors' own dtypes."""
    kind = tensors[0].device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return [t if t.dtype is torch.float64 else t.to(dtype) for t in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1:
        shown = ", ".join(
            f"{name} {_dtype(tensor)}"
            for name, tensor in zip(("query", "key", "value"), tensors, strict=True)
        )
        raise UnsupportedArgument(
            f"{type(module).__name__} hands over {shown}: the model's weights are of several "
            "dtypes, or it computes parts in float32. Run its forward inside torch.autocast, or "
            "convert the whole model with .to(dtype)"
        )
    return list(tensors)


def _check_dtype(lane: Lane, query: torch.Tensor) -> None:
    dtype = lane.running.job.shape.dtype
    if _dtype(query) == dtype:
        return
    if torch.is_autocast_enabled(query.device.type):
        raise UnsupportedArgument(
            f"torch.autocast computes attention in {_dtype(query)}, and the session was opened "
            f"with {dtype}; open it with shape=AttentionShape(..., dtype={_dtype(query)!r}) in "
            "SessionOptions, or turn autocast off"
        )
    raise UnsupportedArgument(
        f"the model computes attention in {_dtype(query)}, and the session was opened with "
        f"{dtype}; open it with shape=AttentionShape(..., dtype={_dtype(query)!r}) in "
        f"SessionOptions, or convert the model with .to(torch.{dtype})"
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _watch_models() -> None:
    """Every model that asks for the implementation is refused if its class cannot have it, and
    else gets the hook that checks it.

    Transformers has no hook for that. It asks this method, of every model that it builds or that is
    given another implementation, whether the implementation will do.
    """
    original = PreTrainedModel.get_correct_attn_implementation

    @functools.wraps(original)
    def watched(
        self: PreTrainedModel, requested_attention: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if requested_attention == IMPLEMENTATION:
            if _is_language_model(self) and not has_attention_interface(type(self)):
                raise UnsupportedModel(
                    f"{type(self).__name__} cannot be served: {no_interface(self.config)}"
                )
            hook_before_forward(self)
        correct: str = original(self, requested_attention, *args, **kwargs)
        return correct

    untyped: Any = PreTrainedModel
    untyped.get_correct_attn_implementation = watched


def _is_language_model(model: PreTrainedModel) -> bool:
    """Not a vision or audio tower, nor what holds one: those may compute attention otherwise."""
    return model.main_input_name == "input_ids" and model.config.get_text_config() is model.config


AttentionInterface.register(IMPLEMENTATION, distca_attention)
AttentionMaskInterface.register(IMPLEMENTATION, distca_mask)
_watch_models()
