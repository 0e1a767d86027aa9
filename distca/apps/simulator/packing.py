"""Plain packing: documents laid one after another over the ranks, whatever their lengths."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from core_attention.arrays import Int64Array, exclusive_cumsum
from core_attention.manifest import (
    MAX_DOCUMENT_TOKENS,
    Manifest,
    RankManifest,
    Segment,
)


def checked_lengths(lengths: ArrayLike, source: str) -> Int64Array:
    """``lengths`` as int64."""
    values = np.asarray(lengths)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{source} holds no document lengths; give one integer per document")
    try:
        whole = values.astype(np.int64)
        bad = np.flatnonzero((whole != values) | (whole < 1) | (whole > MAX_DOCUMENT_TOKENS))
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{source} holds values that are no integers: {error}") from error
    if bad.size:
        raise ValueError(
            f"{source}: length number {bad[0] + 1} is {values[bad[0]]}; a document has 1 to "
            f"{MAX_DOCUMENT_TOKENS} tokens: leave empty documents out"
        )
    return whole


def split_long(lengths: Int64Array, max_length: int) -> Int64Array:
    """Documents longer than ``max_length`` cut into pieces of it, each a document of its own."""
    pieces = -(-lengths // max_length)
    out = np.full(int(pieces.sum()), max_length, dtype=np.int64)
    out[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * max_length
    return out


def take_steps(lengths: Int64Array, n_steps: int, step_tokens: int) -> list[Int64Array]:
    """The documents of ``n_steps`` steps of exactly ``step_tokens`` tokens each, in order.

    The document that crosses the end of a step is cut there and its rest opens the next one.
    """
    total = int(lengths.sum())
    if total < n_steps * step_tokens:
        raise ValueError(
            f"the documents hold {total} tokens, {n_steps} steps of {step_tokens} tokens need "
            f"{n_steps * step_tokens}: ask for fewer steps, ranks or tokens per rank, or give "
            "more documents"
        )
    return _cut_every(lengths, step_tokens)[:n_steps]


def as_trained(
    lengths: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int
) -> Int64Array:
    """The documents as nano-batches hold them: cut where a nano-batch of all ranks ends.

    Methods are compared on these, or disaggregation would be spared the attention across its cuts.
    Arguments as of :func:`pack_in_order`, but of any number of steps or microbatches.
    """
    _check_rows(tokens_per_rank, n_nano_batches)
    return np.concatenate(_cut_every(lengths, n_ranks * (tokens_per_rank // n_nano_batches)))


def pack_in_order(
    lengths: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int, step: int = 0
) -> Manifest:
    """Exactly ``tokens_per_rank`` tokens on every rank, documents in the given order.

    Each nano-batch is a stream of its own that fills rank after rank; a document that crosses the
    end of a rank's rows goes on with the next rank, one that crosses the end of a nano-batch is
    cut into two documents.

    Args:
        lengths: ``[n_documents]``, together ``n_ranks * tokens_per_rank`` tokens.
        n_ranks: ranks of the job.
        tokens_per_rank: rows of each rank in the step, over all nano-batches.
        n_nano_batches: divides ``tokens_per_rank``.
        step: the training step.
    """
    check_tokens(lengths, n_ranks, tokens_per_rank, n_nano_batches)
    rows = tokens_per_rank // n_nano_batches
    streams = _cut_every(lengths, n_ranks * rows)
    length = np.concatenate(streams)
    nano_batch = np.repeat(np.arange(n_nano_batches), [len(stream) for stream in streams])
    # On one line of all rows, documents and (nano-batch, rank) ranges are two sets of cuts.
    document_begin = exclusive_cumsum(length)
    range_begin = np.arange(0, int(length.sum()), rows)
    begin = np.union1d(document_begin, range_begin)
    document = np.searchsorted(document_begin, begin, side="right") - 1
    in_range = begin // rows
    return Manifest(
        step=step,
        n_ranks=n_ranks,
        n_nano_batches=n_nano_batches,
        document_id=np.arange(len(length)),
        document_length=length,
        document_nano_batch=nano_batch,
        segment_document=document,
        segment_offset=begin - document_begin[document],
        segment_length=np.diff(np.append(begin, int(length.sum()))),
        segment_rank=in_range % n_ranks,
        segment_row=begin - in_range * rows,
    )


def rank_manifests(manifest: Manifest) -> list[RankManifest]:
    """Divides ``manifest`` by ranks; :meth:`Manifest.merge` undoes it."""
    nano_batch = manifest.document_nano_batch[manifest.segment_document]
    in_packed_order = np.lexsort((manifest.segment_row, nano_batch, manifest.segment_rank))
    packed: list[list[list[Segment]]] = [
        [[] for _ in range(manifest.n_nano_batches)] for _ in range(manifest.n_ranks)
    ]
    for at in in_packed_order.tolist():
        document = int(manifest.segment_document[at])
        packed[int(manifest.segment_rank[at])][int(nano_batch[at])].append(
            Segment(
                int(manifest.document_id[document]),
                int(manifest.document_length[document]),
                int(manifest.segment_offset[at]),
                int(manifest.segment_length[at]),
            )
        )
    return [
        RankManifest(manifest.step, rank, tuple(tuple(segments) for segments in nano_batches))
        for rank, nano_batches in enumerate(packed)
    ]


def check_tokens(
    lengths: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int
) -> None:
    """Raises ``ValueError`` unless the documents fill the ranks and nano-batches exactly."""
    _check_rows(tokens_per_rank, n_nano_batches)
    if int(lengths.sum()) != n_ranks * tokens_per_rank:
        raise ValueError(
            f"the documents hold {int(lengths.sum())} tokens; {n_ranks} ranks of "
            f"{tokens_per_rank} take {n_ranks * tokens_per_rank}"
        )


def _check_rows(tokens_per_rank: int, n_nano_batches: int) -> None:
    if tokens_per_rank % n_nano_batches:
        raise ValueError(
            f"tokens_per_rank {tokens_per_rank} is not a multiple of nano_batches "
            f"{n_nano_batches}; give a multiple, {n_nano_batches} or more, or nano_batches 1"
        )


def _cut_every(lengths: Int64Array, tokens: int) -> list[Int64Array]:
    """The stream of documents cut into parts of ``tokens`` tokens; a last shorter part is left."""
    ends = np.cumsum(lengths)
    cuts = np.arange(tokens, int(ends[-1]) + 1, tokens)
    all_ends = np.union1d(ends, cuts)
    pieces = np.diff(all_ends, prepend=0)
    bounds = np.searchsorted(all_ends, cuts) + 1
    return [pieces[a:b] for a, b in zip(np.append(0, bounds[:-1]), bounds, strict=True)]
