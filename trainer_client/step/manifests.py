"""Manifests from what data collators hand out: position ids or cumulative lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import torch

from core_attention.errors import ManifestError
from core_attention.host_copies import on_host
from core_attention.manifest import RankManifest, Segment


def manifest_from_position_ids(
    step: int, rank: int, nano_batches: Sequence[torch.Tensor]
) -> RankManifest:
    """The manifest of packed documents whose position ids restart at 0.

    Documents that span ranks cannot be told from position ids: build a
    :class:`~core_attention.manifest.RankManifest` of segments for those.

    Args:
        step: the training step.
        rank: this rank.
        nano_batches: for each nano-batch, ``[rows]`` or ``[1, rows]`` integer position ids.

    Raises:
        ManifestError: ids are 3-D or batched, do not begin at 0, or do not count up by one.
    """
    return RankManifest.from_lengths(
        step, rank, [lengths_of_documents(ids) for ids in nano_batches]
    )


def manifest_from_cu_seqlens(
    step: int, rank: int, nano_batches: Sequence[torch.Tensor]
) -> RankManifest:
    """The manifest of packed documents given by cumulative lengths.

    Args:
        step: the training step.
        rank: this rank.
        nano_batches: for each nano-batch, ``[documents + 1]`` integers from 0 up, as
            ``cu_seq_lens_q``.

    Raises:
        ManifestError: they are not one-dimensional or do not begin at 0. (An empty document is
            found when the step is planned.)
    """
    lengths = []
    for cumulative in map(on_host, nano_batches):
        if cumulative.dim() != 1 or cumulative.numel() < 1 or int(cumulative[0]) != 0:
            raise ManifestError(
                f"cu_seq_lens must be one-dimensional and begin with 0, got shape "
                f"{tuple(cumulative.shape)}"
            )
        lengths.append(cumulative.diff().tolist())
    return RankManifest.from_lengths(step, rank, lengths)


def manifest_of_row(
    step: int, rank: int, batch: Mapping[str, Any], n_parts: int, *, cut_documents: bool = False
) -> RankManifest:
    """The manifest of one packed row with the documents of a whole step, or of a padded batch with
    one in each row, split into nano-batches.

    Args:
        step: the training step.
        rank: this rank.
        batch: holds ``position_ids`` ``[1, rows]`` that restart at 0, or ``cu_seq_lens_q``, or an
            ``attention_mask`` ``[batch, tokens]`` with padding on the right.
        n_parts: nano-batches of the job; see :func:`split_documents`.
        cut_documents: whether the row is split in its middle instead, of two nano-batches.

    Raises:
        ManifestError: it holds none of them, no document, or they do not tell documents apart.
    """
    if batch.get("position_ids") is not None:
        lengths = lengths_of_documents(batch["position_ids"])
    elif batch.get("cu_seq_lens_q") is not None:
        lengths = on_host(batch["cu_seq_lens_q"]).diff().tolist()
    elif is_padded(batch):
        lengths = _padded_lengths(batch["attention_mask"])
    else:
        shown = {
            name: tuple(value.shape) for name, value in batch.items() if hasattr(value, "shape")
        }
        raise ManifestError(
            f"step {step}: the batch holds {shown}, which does not say where documents begin; pack "
            "documents into one row [1, rows] with position_ids that restart at 0: with "
            "data_collator=DataCollatorWithFlattening() in a Trainer of transformers, with "
            "packing=True, or padding_free=True and max_length=None, in TRL's SFTConfig; or give "
            "input_ids and attention_mask [batch, tokens], padded on the right"
        )
    if not lengths:
        raise ManifestError(
            f"step {step}: the row of rank {rank} holds no document; where a model is called with "
            "whole rows, every rank needs a document in each step: leave the step out on all "
            "ranks, or give PingPong the nano-batches, which may be empty"
        )
    if cut_documents:
        n_rows = sum(lengths)
        halves = split_row(lengths, [-(-n_rows // 2), n_rows], count(rank << 32))
        return RankManifest(step, rank, halves)
    return RankManifest.from_lengths(step, rank, split_documents(lengths, n_parts))


def is_padded(batch: Mapping[str, Any]) -> bool:
    """Whether a model's arguments are of a batch of rows, with an attention mask that tells how
    long each is, and not of a packed row."""
    mask = batch.get("attention_mask")
    rows = batch.get("input_ids")
    rows = batch.get("inputs_embeds") if rows is None else rows
    return (
        isinstance(mask, torch.Tensor)
        and mask.dim() == 2
        and isinstance(rows, torch.Tensor)
        and rows.shape[:2] == mask.shape
        and all(batch.get(name) is None for name in ("position_ids", "cu_seq_lens_q"))
    )


def _padded_lengths(mask: torch.Tensor) -> list[int]:
    seen = on_host(mask).bool()
    lengths = seen.sum(1)
    of_right = torch.arange(mask.shape[1]) < lengths[:, None]
    if not torch.equal(seen, of_right) or not bool(lengths.all()):
        row = int(((seen != of_right).any(1) | (lengths == 0)).nonzero()[0])
        raise ManifestError(
            f"row {row} of attention_mask {tuple(mask.shape)} has padding before or between its "
            "tokens, or no token; every row begins with a token, and padding is on the right"
        )
    of_rows: list[int] = lengths.tolist()
    return of_rows


def split_row(
    lengths: Sequence[int], ends: Sequence[int], ids: Iterator[int]
) -> list[list[Segment]]:
    """Documents of one packed row in order, as segments of neighbouring ranges of its rows; those
    that reach over the end of a range are cut there.

    Args:
        lengths: tokens of each document.
        ends: of the ranges, ascending; the last one is all rows.
        ids: of documents; one is taken for each.
    """
    parts: list[list[Segment]] = [[] for _ in ends]
    begin = 0
    for length in lengths:
        document = next(ids)
        for part, low, high in zip(parts, (0, *ends), ends, strict=False):
            cut_begin, cut_end = max(begin, low), min(begin + length, high)
            if cut_begin < cut_end:
                part.append(Segment(document, length, cut_begin - begin, cut_end - cut_begin))
        begin += length
    return parts


def split_documents(lengths: Sequence[int], n_parts: int) -> list[list[int]]:
    """Documents of one packed row in order, as ``n_parts`` nano-batches of nearly equal tokens.

    Args:
        lengths: tokens of each document.
        n_parts: nano-batches; those that nothing is left for are empty, the last ones.
    """
    parts: list[list[int]] = [[]]
    taken, total = 0, sum(lengths)
    for length in lengths:
        # A document goes where its middle lies; none is cut, and no part but the last ones is
        # empty.
        part = int((taken + length / 2) * n_parts / total)
        if part >= len(parts) and parts[-1] and len(parts) < n_parts:
            parts.append([])
        parts[-1].append(length)
        taken += length
    return parts + [[] for _ in range(n_parts - len(parts))]


def lengths_of_documents(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each document.

    Args:
        position_ids: ``[rows]`` or ``[1, rows]`` integers that restart at 0 for each document.

    Raises:
        ManifestError: as :func:`manifest_from_position_ids`.
    """
    if position_ids.dim() == 2 and position_ids.shape[0] == 1:
        position_ids = position_ids[0]
    if position_ids.dim() != 1:
        raise ManifestError(
            f"position ids have shape {tuple(position_ids.shape)}; give [rows] or [1, rows]: pack "
            "documents into one row (3-D multimodal ids are not supported)"
        )
    position_ids = on_host(position_ids)
    starts = (position_ids == 0).nonzero().flatten()
    if position_ids.numel() and (not starts.numel() or int(starts[0]) != 0):
        raise ManifestError(
            f"position ids begin with {int(position_ids[0])}; every document begins at 0: for a "
            "document that continues from another rank, build its segments yourself"
        )
    ends = torch.cat([starts[1:], starts.new_tensor([position_ids.numel()])])
    lengths = ends - starts
    expected = torch.arange(position_ids.numel()) - starts.repeat_interleave(lengths)
    if not torch.equal(position_ids, expected):
        at = int((position_ids != expected).nonzero()[0])
        raise ManifestError(
            f"position ids jump to {int(position_ids[at])} at row {at}, where {int(expected[at])} "
            "comes next; they count up by one from 0 in every document"
        )
    return [int(length) for length in lengths]
