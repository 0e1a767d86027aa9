"""Masks of transformers models: which kind of layer asks for them, without materialising them.

Transformers makes one mask for each kind of layers and hands it to their attention. Ours is a
:class:`LayerMask`, or None for a full layer. The mask function is asked at the borders of every
row, so that a mask that shows more or less than its kind says is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from core_attention.ca_task import MaskKind
from core_attention.host_copies import on_device
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.pipelining_dry_run import is_shape_inference
from trainer_client.local_attention.at_home import HomeMask, is_at_home
from trainer_client.models.document_check import current_check
from trainer_client.models.documents import Documents, documents_of
from trainer_client.step.home_tasks import FULL, LayerKind
from trainer_client.step.lane import current_lane, current_step, require_lane


@dataclass(frozen=True)
class LayerMask:
    """The mask of layers that do not see all that was before a query, or see what comes after it.

    Attributes:
        kind: what they see.
        mask: whether later keys too.
    """

    kind: LayerKind
    mask: MaskKind = MaskKind.CAUSAL


CAUSAL = LayerMask(FULL)
"""Stands for a mask of None."""


@dataclass(frozen=True)
class UnsupportedMask:
    """Stands in for a mask that is not supported, until attention itself can name it."""

    reason: str

    def __repr__(self) -> str:
        return self.reason


def distca_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> LayerMask | UnsupportedMask | HomeMask | LaterMask | None:
    """The mask that transformers hands to attention: None for causal full layers.

    The documents come from the manifest, so nothing is materialised. A mask that hides more, or
    less, than its kind says comes back as an object that the attention refuses by name.
    """
    asked = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "attention_mask": attention_mask,
        **({"mask_function": mask_function} if mask_function else {}),
        **kwargs,
    }
    if (check := current_check.get()) is not None:
        return _mask(check.documents, **asked)
    if is_at_home():
        return HomeMask(asked)
    recomputed = Checkpoints().recomputed
    if is_shape_inference(recomputed):
        return _mask(None, **asked)
    if (current_lane.get() or current_step.get() or recomputed) is None:
        return LaterMask(asked)
    return _mask(documents_of(require_lane()), **asked)


@dataclass(frozen=True)
class LaterMask:
    """A mask that a model makes before the documents of its decoder are known.

    Attributes:
        asked: arguments of :func:`distca_mask`.
    """

    asked: dict[str, Any]

    def of(self, documents: Documents) -> LayerMask | UnsupportedMask | None:
        """The mask for a packed row of these documents."""
        asked, n_rows = (self.asked["batch_size"], self.asked["q_length"]), sum(documents.lengths)
        if asked != (1, n_rows):
            return UnsupportedMask(
                f"that of a batch {list(asked)}, and the documents are one row of {n_rows} tokens "
                "(pack them before masks are made)"
            )
        return _mask(documents, **self.asked)


def _mask(
    documents: Documents | None,
    *,
    q_length: int,
    kv_length: int,
    q_offset: int,
    kv_offset: int,
    attention_mask: torch.Tensor | None,
    mask_function: Callable[..., Any] | None = None,
    **kwargs: Any,
) -> LayerMask | UnsupportedMask | None:
    """The mask for these documents; None: only shapes are asked for."""
    if attention_mask is not None and not bool(attention_mask.all()):
        return UnsupportedMask("padding (remove padding and pack documents instead)")
    if kwargs.get("use_vmap"):
        return UnsupportedMask(
            "a mask function of the model's own (train a multimodal model's text-only class, if "
            "there are no pictures)"
        )
    if q_length != kv_length or q_offset or kv_offset:
        return UnsupportedMask(f"a cache ({q_length} queries, {kv_length} keys)")
    local_size = kwargs.get("local_size")
    if local_size is not None and local_size < 1:
        return UnsupportedMask(f"a window of {local_size} tokens")
    kind = kind_of(local_size, kwargs.get("config"))
    mask = None if kind.is_full else LayerMask(kind)
    if mask_function is None or documents is None:
        return mask
    if kind.is_full and not documents.tell_masks_apart:
        return None  # Nothing tells masks apart, nor does it matter.
    # Chunks of Llama 4 are counted from a tensor on the model's device.
    device = torch.device(kwargs.get("device") or "cpu")
    if kind.is_full and _shows_all(documents, mask_function, device):
        return LayerMask(kind, MaskKind.FULL)
    if not shows(documents, mask_function, kind, device):
        return UnsupportedMask(
            f"neither causal with {'all keys' if kind.is_full else kind} within documents nor "
            "bidirectional (of the model's own kind)"
        )
    return mask


def current_documents() -> Documents:
    """Documents of the check that runs, or else of the lane."""
    check = current_check.get()
    return documents_of(require_lane()) if check is None else check.documents


def kind_of(local_size: int | None, config: Any) -> LayerKind:
    """The kind of a layer; transformers has one name for the size of windows and chunks."""
    if local_size is None:
        return FULL
    chunk = getattr(config, "attention_chunk_size", None)
    if chunk == local_size and getattr(config, "sliding_window", None) != local_size:
        return LayerKind(chunk=local_size)
    return LayerKind(window=local_size)


def _shows_all(
    documents: Documents, mask_function: Callable[..., Any], device: torch.device
) -> bool:
    """Return whether each row sees the first and the last row of its segment: then the mask is
    bidirectional. What it shows of other documents does not matter."""
    segments = on_device(torch.tensor(documents.segments, dtype=torch.int64), device)
    begin, _, length = segments.reshape(-1, 3).unbind(1)
    first, last = (row.repeat_interleave(length) for row in (begin, begin + length - 1))
    rows = torch.arange(len(first), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    sees_first = torch.as_tensor(mask_function(zero, zero, rows, first))
    sees_last = torch.as_tensor(mask_function(zero, zero, rows, last))
    return bool(sees_first.all() & sees_last.all())


def shows(
    documents: Documents,
    mask_function: Callable[..., Any],
    kind: LayerKind,
    device: torch.device,
) -> bool:
    """Asks the mask at its borders: each row must see itself and the first key that its kind lets
    it see, and neither the next row nor the key before that first one. Rows are asked for by
    indices on ``device``, where the tensors of the mask are.

    Transformers counts chunks by positions, or from the first row if it does not see that documents
    are packed; the manifest says from where they are counted. So where no document is longer than
    the chunk, only the row itself and the next are asked, as with windows.
    """
    segments = on_device(torch.tensor(documents.segments, dtype=torch.int64), device)
    begin, _, length = segments.reshape(-1, 3).unbind(1)
    start = begin.repeat_interleave(length)
    rows = torch.arange(len(start), device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def sees(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(mask_function(zero, zero, queries, keys))

    right = sees(rows, rows).all() & ~sees(rows[:-1], rows[1:]).any()
    if kind.reach is not None and kind.reach >= documents.longest:
        return bool(right)
    first = start
    if kind.window is not None:
        first = torch.maximum(start, rows - kind.window + 1)
    if kind.chunk is not None:
        positions = documents.positions
        is_packed = bool((positions.diff() != 1).any())
        counted = positions.to(device) if is_packed else rows
        first = torch.maximum(start, rows - counted % kind.chunk)
    hidden = first > start
    right = right & sees(rows, first).all() & ~sees(rows[hidden], first[hidden] - 1).any()
    # One question to the device, which the mask may be on.
    return bool(right)
