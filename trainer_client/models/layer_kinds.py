"""What kind of layer a module of transformers is, and whether all that it says agrees."""

from __future__ import annotations

from typing import Any

from torch import nn

from core_attention.ca_task import MaskKind
from trainer_client.models.document_check import UnsupportedArgument, check_of
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

    Raises:
        UnsupportedArgument: they differ where it changes the result.
    """
    longest = documents.longest
    if sliding_window is not None and sliding_window != kind.reach and sliding_window < longest:
        raise UnsupportedArgument(
            f"{type(module).__name__} calls attention with sliding_window={sliding_window} and a "
            f"mask that is {kind}, and the longest document of {documents.where} has {longest} "
            "tokens: it is not clear which keys a query sees"
        )
    said = _kind_in_config(module)
    if said is None or said == str(kind).split()[0]:
        return
    if said != "full" and kind.is_full and _reach_in_config(module, said) is None:
        return  # The config turns windows off.
    if not kind.is_full and kind.reach is not None and kind.reach >= longest:
        return
    raise UnsupportedArgument(
        f"layer {getattr(module, 'layer_idx', '?')} of {type(module).__name__} is of type "
        f"{said} in its config, and its mask is {kind}"
    )


def check_causality(module: nn.Module, mask: MaskKind, *, is_causal: bool) -> None:
    """Compares a layer's mask with what its module or call says.

    Raises:
        UnsupportedArgument: they differ.
    """
    if is_causal == (mask is MaskKind.CAUSAL):
        return
    kind = "causal" if mask is MaskKind.CAUSAL else "bidirectional"
    raise UnsupportedArgument(
        f"attn_implementation='distca' does not support is_causal={is_causal} with a mask that is "
        f"{kind}, as {type(module).__name__} has them: it is not clear which keys a query sees"
    )


def mask_of(module: nn.Module, asked: LayerMask, documents: Documents) -> MaskKind:
    """The mask of a layer, from that of its call where documents tell masks apart: a probe has
    none, and in single rows all masks are one."""
    check = check_of(module)
    if check is not None and check.calls and not documents.tell_masks_apart:
        return check.calls[0].mask
    return asked.mask


def serves_windows(module: nn.Module) -> bool:
    """Whether layers with windows are served in the module's model: it has no others."""
    check = check_of(module)
    return check is not None and check.serves_windows


def refuse_short_window(module: nn.Module, kind: LayerKind, documents: Documents) -> None:
    """Refuses documents that do not fit into the window of a layer that is served.

    Raises:
        UnsupportedArgument: there is one.
    """
    if kind.reach is not None and kind.reach < documents.longest:
        raise UnsupportedArgument(
            f"every layer of this model has a window or chunks, that of {type(module).__name__} "
            f"{kind.reach} tokens, and the longest document of {documents.where} has "
            f"{documents.longest}: no layer computes attention over whole documents, so that there "
            "is nothing to balance. Train it without DistCA, cut documents to the window, or turn "
            "the window off in the model's config"
        )


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
