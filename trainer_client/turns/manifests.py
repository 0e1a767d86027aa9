"""Manifests from what data collators hand out: position ids or cumulative lengths."""

from __future__ import annotations

from itertools import count

import torch

from core_attention.errors import ManifestError
from core_attention.host_copies import on_host
from core_attention.manifest import NO_PARENT, RankManifest, Segment
from trainer_client.options import SessionOptions
from trainer_client.turns.branches import Branches, RowDocuments
from trainer_client.turns.parts import cut, segments_of, split_documents


def manifest_of_forward(
    step: int, options: SessionOptions, documents: RowDocuments, own: range
) -> RankManifest:
    """The manifest of one packed row that is split into some nano-batches of a step.

    Args:
        step: the training step.
        options: of the session.
        documents: of the row.
        own: its nano-batches; two, if documents are cut.
    """
    rank, n_after = options.rank, options.n_nano_batches - own.stop
    lengths, branches = documents
    if options.cut_documents or branches is not None:
        parts = cut(lengths, len(own), inside_documents=options.cut_documents)
        held = segments_of(lengths, parts, count(rank << 32))
        if branches is not None:
            held = [[_branched(each, branches, rank) for each in segments] for segments in held]
        return RankManifest(step, rank, [[]] * own.start + held + [[]] * n_after)
    split = split_documents(lengths, len(own))
    return RankManifest.from_lengths(step, rank, [[]] * own.start + split + [[]] * n_after)


def _branched(segment: Segment, branches: Branches, rank: int) -> Segment:
    """A segment, counted from the root of its document's path."""
    document = segment.document_id - (rank << 32)
    offset, parent = branches.offsets[document], branches.parents[document]
    if parent != NO_PARENT:
        parent += (rank if branches.ranks is None else branches.ranks[document]) << 32
    return Segment(
        document_id=segment.document_id,
        document_length=segment.document_length + offset,
        offset=segment.offset + offset,
        length=segment.length,
        document_parent=parent,
        document_offset=offset,
    )


def padded_lengths(seen: torch.Tensor) -> list[int]:
    """Tokens of each row of a batch.

    Args:
        seen: ``[batch, tokens]`` bool on the host, true where a token is.
    """
    lengths = seen.sum(1)
    runs = seen[:, :1].long().squeeze(1) + (seen[:, 1:] & ~seen[:, :-1]).sum(1)
    if not bool((runs == 1).all()):
        row = int((runs != 1).nonzero()[0])
        raise ManifestError(
            f"row {row} of attention_mask {tuple(seen.shape)} has {int(runs[row])} runs of tokens; "
            "each row has one, with padding before or behind it"
        )
    of_rows: list[int] = lengths.tolist()
    return of_rows


def lengths_between(cumulative: torch.Tensor) -> list[int]:
    """Tokens of each document.

    Args:
        cumulative: ``[documents + 1]`` integers from 0 up, as ``cu_seq_lens_q``.
    """
    cumulative = on_host(cumulative)
    if cumulative.dim() != 1 or cumulative.numel() < 1 or int(cumulative[0]) != 0:
        raise ManifestError(
            f"cu_seq_lens must be one-dimensional and begin with 0, got shape "
            f"{tuple(cumulative.shape)}"
        )
    lengths: list[int] = cumulative.diff().tolist()
    return lengths


def numbered_lengths(mask: torch.Tensor) -> list[int]:
    """Tokens of each document of a batch whose mask numbers them.

    Args:
        mask: ``[batch, tokens]`` integers on the host, such as ``1 1 2 2 2 0``; 0 is padding.
    """
    begins = torch.ones_like(mask, dtype=torch.bool)
    begins[:, 1:] = mask[:, 1:] != mask[:, :-1]
    documents = begins.flatten().cumsum(0)[mask.flatten() != 0]
    lengths: list[int] = documents.unique_consecutive(return_counts=True)[1].tolist()
    return lengths


def lengths_of_documents(position_ids: torch.Tensor) -> list[int]:
    """Tokens of each document.

    Args:
        position_ids: ``[rows]`` or ``[1, rows]`` integers that restart at 0 for each document.

    Raises:
        ManifestError: ids are 3-D or batched, do not begin at 0, or do not count up by one.
    """
    if position_ids.dim() == 2 and position_ids.shape[0] == 1:
        position_ids = position_ids[0]
    if position_ids.dim() != 1:
        raise ManifestError(
            f"position ids have shape {tuple(position_ids.shape)}; pack documents into one row, "
            "[rows] or [1, rows] (3-D multimodal ids are not supported)"
        )
    position_ids = on_host(position_ids)
    starts = (position_ids == 0).nonzero().flatten()
    if position_ids.numel() and (not starts.numel() or int(starts[0]) != 0):
        raise ManifestError(
            f"position ids begin with {int(position_ids[0])}; begin every document at 0, or build "
            "segments of documents that span ranks yourself"
        )
    ends = torch.cat([starts[1:], starts.new_tensor([position_ids.numel()])])
    lengths = ends - starts
    expected = torch.arange(position_ids.numel()) - starts.repeat_interleave(lengths)
    if not torch.equal(position_ids, expected):
        at = int((position_ids != expected).nonzero()[0])
        raise ManifestError(
            f"position ids jump to {int(position_ids[at])} at row {at}, not {int(expected[at])}; "
            "count up by one from 0 in every document"
        )
    return [int(length) for length in lengths]
