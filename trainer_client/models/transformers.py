"""Hugging Face transformers: importing this module registers ``attn_implementation="distca"``.

The model's core attention is then served, with the documents of the current step's manifest. What
the model hands over is checked against the manifest, and an argument that would change the result
and is not supported raises by name: nothing is silently ignored.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from core_attention.host_copies import on_device
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.compile_boundary import outside_graphs, refuse_tracing
from trainer_client.hooks.pipelining_dry_run import is_shape_inference, of_the_right_shape
from trainer_client.local_attention.at_home import (
    HomeMask,
    attend_at_home,
    document_lengths,
    is_at_home,
)
from trainer_client.models.document_check import (
    IMPLEMENTATION,
    REPLACED,
    LayerCall,
    UnsupportedModel,
    check_documents,
    check_of,
    current_check,
    has_attention_interface,
    hook_before_forward,
    no_interface,
)
from trainer_client.models.documents import CHECKED, Documents
from trainer_client.models.layer_kinds import (
    check_causality,
    check_kind,
    mask_of,
)
from trainer_client.models.layer_masks import (
    CAUSAL,
    LayerMask,
    current_documents,
    distca_mask,
    kind_of,
    shows,
)
from trainer_client.step.home_tasks import FULL, LayerKind
from trainer_client.step.lane import Lane, require_lane
from trainer_client.step.operation import core_attention
from trainer_client.step.sinks import with_sinks
from trainer_client.turns.branches import TREE_ARGUMENTS, RowDocuments

__all__ = [
    "IMPLEMENTATION",
    "UnsupportedModel",
    "check_documents",
    "distca_attention",
    "distca_mask",
]

logger = logging.getLogger(__name__)

_WITHOUT_EFFECT = (
    # Sizes that follow from the documents, and settings of the model's outputs and its loss.
    "max_length_q",
    "max_length_k",
    "cache_position",
    "use_cache",
    "output_hidden_states",
    "output_router_logits",
    "num_items_in_batch",
    "logits_to_keep",
    "return_dict",
)
_NEUTRAL: dict[str, Any] = {"output_attentions": False, "dropout": 0.0}
"""Arguments that are supported with this one value only (or None)."""


@outside_graphs
def distca_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Core attention of one layer, as transformers calls it.

    Full layers are served. Layers with a window or with chunks are computed here, if the model has
    full ones besides.

    Args:
        module: the model's attention module.
        query: ``[1, num_heads, rows, head_dim]``.
        key: ``[1, num_heads_kv, rows, head_dim]``.
        value: ``[1, num_heads_kv, rows, head_dim_v]``.
        attention_mask: see :func:`trainer_client.models.layer_masks.distca_mask`.
        scaling: must be the session's softmax scale in a layer that is served.
        dropout: must be 0.
        sliding_window: must be the mask's.
        softcap: must be the session's in a layer that is served.
        s_aux: ``[num_heads]`` attention sinks.
        kwargs: whatever else the model passes; see the module's text.

    Returns:
        o ``[1, rows, num_heads, head_dim_v]`` and no attention weights.
    """
    refuse_tracing()
    checkpoints = Checkpoints()
    if is_shape_inference(checkpoints.recomputed):
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        o, lse = of_the_right_shape(q, k, v, checkpoints)
        return (o if s_aux is None else with_sinks(o, lse, s_aux)), None
    if current_check.get() is None and is_at_home():
        attend = functools.partial(attend_at_home, softcap=softcap or 0.0, sinks=s_aux)
        told = attention_mask, scaling, dropout
        return _at_home(attend, module, query, key, value, *told, kwargs), None
    documents = current_documents()
    asked = attention_mask if isinstance(attention_mask, LayerMask) else CAUSAL
    mask = mask_of(module, asked, documents)
    is_causal = getattr(module, "is_causal", True) and kwargs.pop("is_causal", None) is not False
    unknown = None if isinstance(attention_mask, LayerMask) else attention_mask
    _refuse_unsupported({**kwargs, "attention_mask": unknown, "dropout": dropout})
    check_causality(module, mask, is_causal=is_causal)
    check_kind(module, asked.kind, sliding_window, documents)
    if query.shape[0] != 1:
        raise UnsupportedModel(
            f"query has a batch of {query.shape[0]}; pack documents into one row [1, rows] with "
            "position_ids that restart at 0"
        )
    layer = LayerCall(asked.kind, softcap or 0.0, scaling, s_aux, mask)
    query, key, value = _cast(module, query, key, value)
    return _attend(module, query, key, value, layer, documents, kwargs), None


def _at_home(
    attend: Callable[..., torch.Tensor],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float | None,
    dropout: float,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    """Attention by ``attend`` of rows that nobody has planned."""
    tree = RowDocuments.of_tree(kwargs, query.shape[0] * query.shape[2])
    kwargs = {name: value for name, value in kwargs.items() if name not in TREE_ARGUMENTS}
    _refuse_unsupported({name: value for name, value in kwargs.items() if name != "is_causal"})
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UnsupportedModel(
            f"{type(module).__name__} asks for attention that is not causal; attn_implementation="
            "'distca' computes causal attention only where nothing was planned"
        )
    query, key, value = _cast(module, query, key, value)
    if tree is not None:
        attend = functools.partial(attend, kind=_kind_at_home(mask), branches=tree.branches)
        return attend(module, query, key, value, None, scaling, dropout, tree.lengths)
    lengths, positions = None, kwargs.get("position_ids")
    if positions is not None and query.shape[0] == 1 and query.shape[2] == key.shape[2]:
        if mask is None:
            lengths = document_lengths(positions)
        elif isinstance(mask, HomeMask):
            if id(positions) not in mask.known:
                mask.known[id(positions)] = positions, *_documents_at_home(mask, positions)
            _, lengths, apart = mask.known[id(positions)]
            mask = mask if apart is None else apart
    return attend(module, query, key, value, mask, scaling, dropout, lengths)


def _kind_at_home(mask: Any) -> LayerKind:
    """The kind of a layer whose documents share prefixes."""
    if mask is None:
        return FULL
    if not isinstance(mask, HomeMask) or mask.pads or mask.asked.get("use_vmap"):
        raise UnsupportedModel(
            "documents share prefixes, and the mask pads rows or is the model's own; give one row "
            "without attention_mask"
        )
    return kind_of(mask.asked.get("local_size"), mask.asked.get("config"))


def _documents_at_home(
    mask: HomeMask, positions: torch.Tensor
) -> tuple[list[int] | None, torch.Tensor | None]:
    """The documents' lengths, if ``mask`` hides later keys and other documents and nothing else;
    or None. Then, if there are several, what ``mask`` shows within documents, whether the model
    asked for that or not: gpt-oss shows only the window."""
    lengths = document_lengths(positions) if positions.numel() == mask.asked["q_length"] else None
    if lengths is None or mask.pads:
        return None, None
    if mask.follows_documents:
        function = mask.asked.get("mask_function")
        begins = [0, *itertools.accumulate(lengths[:-1])]
        documents = Documents("at home", [(b, 0, n) for b, n in zip(begins, lengths, strict=True)])
        if function is None or shows(documents, function, FULL, positions.device):
            return lengths, None
    if len(lengths) == 1:
        return None, None
    if mask.tensor is None:
        return lengths, None
    document = on_device(torch.repeat_interleave(torch.tensor(lengths)), mask.tensor.device)
    return None, mask.tensor & (document[:, None] == document)


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCall,
    documents: Documents,
    given: dict[str, Any],
) -> torch.Tensor:
    """Core attention in a check or a step: o ``[1, rows, num_heads, head_dim_v]``.

    Args:
        layer: what the module asks for.
        documents: of the nano-batch.
        given: arguments of the call, those that show documents among them.
    """
    documents.check(given)
    if (check := current_check.get()) is not None:
        return check.attend(module, query, key, value, layer)
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    lane = require_lane()
    _refuse_unproven(module, documents)
    _refuse_cached_keys(module, q, k)
    scale = layer.scaling
    if layer.kind.is_full:
        _check_mask(lane, layer, module)
        _check_dtype(lane, query)
    elif scale is None:
        scale = q.shape[-1] ** -0.5
    return core_attention(
        q,
        k,
        v,
        window=layer.kind.window,
        chunk=layer.kind.chunk,
        sinks=layer.sinks,
        softcap=layer.softcap,
        scale=scale,
    )[None]


def _refuse_cached_keys(module: nn.Module, q: torch.Tensor, k: torch.Tensor) -> None:
    if len(k) > len(q):
        raise UnsupportedModel(
            f"{type(module).__name__} attends from {len(q)} rows to the keys of {len(k)}, some of "
            "them cached; give the model use_cache=False"
        )


def _refuse_unsupported(arguments: dict[str, Any]) -> None:
    refused = {
        name: value
        for name, value in arguments.items()
        if value is not None
        and name not in CHECKED
        and name not in _WITHOUT_EFFECT
        and not (name in _NEUTRAL and value == _NEUTRAL[name])
    }
    if refused:
        shown = ", ".join(f"{name}={_short(value)}" for name, value in sorted(refused.items()))
        raise UnsupportedModel(
            f"attn_implementation='distca' does not support {shown}; turn the feature off in the "
            "model's config, or use another implementation"
        )


def _short(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)


def _check_mask(lane: Lane, layer: LayerCall, module: nn.Module) -> None:
    mask = lane.running.job.shape.mask
    if layer.mask is not mask:
        raise UnsupportedModel(
            f"the attention of {type(module).__name__} is {layer.mask.name}, the session's "
            f"{mask.name}; open it with AttentionShape(..., mask=MaskKind.{layer.mask.name})"
        )


def _refuse_unproven(module: nn.Module, documents: Documents) -> None:
    check = check_of(module)
    if check is None:
        raise UnsupportedModel(
            f"nothing shows that the model of {type(module).__name__} keeps documents apart; call "
            "check_documents(model) before it is sharded, or on all ranks before its first step"
        )
    if check.fault and not documents.is_one_from_its_start:
        raise UnsupportedModel(
            f"{documents.where} holds segments of lengths {documents.lengths[:8]}, and "
            f"{type(module).__name__} can have one whole document in a nano-batch only: "
            f"{check.fault}"
        )
    if missing := sorted(check.needs - documents.shown):
        raise UnsupportedModel(
            f"{documents.where}: the model of {type(module).__name__} was called without "
            f"{', '.join(missing)}; hand it over, with position_ids that restart at 0 in every "
            "document"
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
        raise UnsupportedModel(
            f"{type(module).__name__} hands over {shown}: weights are of several dtypes; run the "
            "forward inside torch.autocast, or convert the model with .to(dtype)"
        )
    return list(tensors)


def _check_dtype(lane: Lane, query: torch.Tensor) -> None:
    dtype = lane.running.job.shape.dtype
    if _dtype(query) == dtype:
        return
    if torch.is_autocast_enabled(query.device.type):
        raise UnsupportedModel(
            f"torch.autocast computes attention in {_dtype(query)}, the session in {dtype}; open "
            f"it with AttentionShape(..., dtype={_dtype(query)!r}), or turn autocast off"
        )
    raise UnsupportedModel(
        f"the model computes attention in {_dtype(query)}, the session in {dtype}; open it with "
        f"AttentionShape(..., dtype={_dtype(query)!r}), or convert the model with "
        f".to(torch.{dtype})"
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
            if _is_tower(self):
                # Its own default: its rows are of pictures or sounds, which no manifest has.
                own: str = original(self, None, *args, **kwargs)
                logger.info("%s computes its attention itself, by %r", type(self).__name__, own)
                return own
            if _is_language_model(self) and not has_attention_interface(type(self)):
                raise UnsupportedModel(
                    f"{type(self).__name__} cannot be served: {no_interface(self.config)}"
                )
            hook_before_forward(self)
        correct: str = original(self, requested_attention, *args, **kwargs)
        return correct

    untyped: Any = PreTrainedModel
    untyped.get_correct_attn_implementation = watched
    if REPLACED:
        untyped._check_and_adjust_attn_implementation = _replacing(
            untyped._check_and_adjust_attn_implementation
        )


def _replacing(original: Callable[..., str]) -> Callable[..., str]:
    """As ``original``, of the method by which models check the implementation they are to have; the
    replaced one needs nothing that it needs by itself."""

    @functools.wraps(original)
    def check(
        self: PreTrainedModel, attn_implementation: str | None, *args: Any, **kwargs: Any
    ) -> str:
        if attn_implementation != REPLACED:
            return original(self, attn_implementation, *args, **kwargs)
        correct = self.get_correct_attn_implementation(IMPLEMENTATION)
        return REPLACED if correct == IMPLEMENTATION else correct

    return check


def _is_language_model(model: PreTrainedModel) -> bool:
    """Not a vision or audio tower, nor what holds one: those may compute attention otherwise."""
    return model.main_input_name == "input_ids" and model.config.get_text_config() is model.config


def _is_tower(model: PreTrainedModel) -> bool:
    """Return whether the model encodes pictures or sounds and knows no tokens. A tower with the
    config of the whole model, such as Whisper's encoder, cannot have an implementation of its
    own."""
    modalities = model.input_modalities
    of_text = ({modalities} if isinstance(modalities, str) else set(modalities)) == {"text"}
    return not of_text and getattr(model.config.get_text_config(), "vocab_size", None) is None


for _name in filter(None, (IMPLEMENTATION, REPLACED)):
    AttentionInterface.register(_name, distca_attention)
    AttentionMaskInterface.register(_name, outside_graphs(distca_mask))
_watch_models()
