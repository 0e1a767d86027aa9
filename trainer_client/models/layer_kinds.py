"""The kind of a layer of transformers, and checks that all it says agrees."""

from __future__ import annotations

from typing import Any

from torch import nn

from core_attention.ca_task import MaskKind
from trainer_client.models.document_check import UnsupportedModel, check_of
from trainer_client.models.documents import Documents
from trainer_client.models.layer_masks import LayerMask
from trainer_client.step.home_tasks import LayerKind

_OF_TYPES = {
    "full_attention": "full",
    "sliding_attention": "window",
    "chunked_attention": "chunks",
}
"""Kinds by the names that configurations give to layers."""


def check_kind(
    module: nn.Module, kind: LayerKind, sliding_window: int | None, documents: Documents
) -> None:
    """Compares the kind that a layer's mask has with what its call and its config say.

    Args:
        module: the model's attention module.
        kind: of the mask.
        sliding_window: what the call says.
        documents: of the nano-batch.
    """
    longest = documents.longest
    if sliding_window is not None and sliding_window != kind.reach and sliding_window < longest:
        raise UnsupportedModel(
            f"{type(module).__name__} calls attention with sliding_window={sliding_window} and a "
            f"mask that is {kind}; make them equal, or longer than {longest} tokens "
            f"({documents.where})"
        )
    said = _kind_in_config(module)
    if said is None or said == str(kind).split()[0]:
        return
    if said != "full" and kind.is_full and _reach_in_config(module, said) is None:
        return  # The config turns windows off.
    if not kind.is_full and kind.reach is not None and kind.reach >= longest:
        return
    raise UnsupportedModel(
        f"layer {getattr(module, 'layer_idx', '?')} of {type(module).__name__} is of type "
        f"{said} in its config, and its mask is {kind}"
    )


def check_causality(module: nn.Module, mask: MaskKind, *, is_causal: bool) -> None:
    """Compares a layer's mask with what its module or call says."""

    if is_causal == (mask is MaskKind.CAUSAL):
        return
    kind = "causal" if mask is MaskKind.CAUSAL else "bidirectional"
    raise UnsupportedModel(
        f"{type(module).__name__} says is_causal={is_causal} with a mask that is {kind}; "
        "attn_implementation='distca' does not support that"
    )


def mask_of(module: nn.Module, asked: LayerMask, documents: Documents) -> MaskKind:
    """The mask of a layer, from that of its call where documents distinguish masks: in
    single rows all masks are one."""
    check = check_of(module)
    if check is not None and check.calls and not documents.tell_masks_apart:
        return check.calls[0].shape.mask
    return asked.mask


def _kind_in_config(module: nn.Module) -> str | None:
    """As the first word of a kind; None if the config does not say."""
    types = getattr(getattr(module, "config", None), "layer_types", None)
    index = getattr(module, "layer_idx", None)
    if not isinstance(types, list | tuple) or not isinstance(index, int) or index >= len(types):
        return None
    return _OF_TYPES.get(types[index])


def _reach_in_config(module: nn.Module, said: str) -> Any:
    name = "attention_chunk_size" if said == "chunks" else "sliding_window"
    return getattr(module.config, name, None)
