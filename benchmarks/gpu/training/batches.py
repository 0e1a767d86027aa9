"""The documents of a batch, and where each way of spreading core attention puts their tokens.

All ways train on the same documents with the same tokens, so their losses must agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from benchmarks.gpu.training.loss import IGNORED_LABEL
from control_plane.planner.homes import plan_homes
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from core_attention.manifest import RankManifest, Segment
from core_attention.plan import PlanServer
from distca.apps.simulator.lengths import sample_lengths
from distca.apps.simulator.packing import take_steps

ONE_DOCUMENT = "one-document"
"""Instead of a distribution of lengths: one document that fills all ranks."""


class CannotRun(ValueError):
    """A way of spreading core attention cannot run a batch."""


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """Packed rows of documents.

    Attributes:
        input_ids: ``[1, n_tokens]`` int64.
        position_ids: ``[1, n_tokens]`` int64, positions in the document.
        labels: ``[1, n_tokens]`` int64, the document's next token; IGNORED_LABEL at its end.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """The documents of one step.

    Attributes:
        seed: of their lengths and tokens.
        ranks: by rank, the lengths that plain packing gives it, in order; each sums to
            ``tokens_per_rank``. A document that crosses the end of a rank is cut there, for all.
            With ONE_DOCUMENT that document is at rank 0 and the others have none.
    """

    seed: int
    ranks: tuple[Int64Array, ...]

    @property
    def lengths(self) -> Int64Array:
        """All documents; their indices are their ids."""
        return np.concatenate(self.ranks)

    @property
    def tokens_per_rank(self) -> int:
        return int(self.lengths.sum()) // len(self.ranks)

    @property
    def qk_pairs(self) -> int:
        """Query-key pairs under the causal mask."""
        lengths = self.lengths
        return int((lengths * (lengths + 1) // 2).sum())


def draw_batch(
    seed: int, n_ranks: int, tokens_per_rank: int, distribution: str, stretch: int = 1
) -> Batch:
    """Documents of ``distribution`` that fill all ranks; none is longer than a rank, but for the
    only one of ONE_DOCUMENT.

    Args:
        seed: of the lengths and tokens.
        n_ranks: ranks to fill.
        tokens_per_rank: a multiple of ``stretch``.
        distribution: of the lengths, see ``distca.apps.simulator.lengths``; or ONE_DOCUMENT.
        stretch: every document is that many times as long as it was drawn.

    Raises:
        ValueError: ``tokens_per_rank`` is no multiple of ``stretch``.
    """
    drawn_tokens, rest = divmod(tokens_per_rank, stretch)
    if rest:
        raise ValueError(
            f"tokens_per_rank is {tokens_per_rank}; it must be a multiple of stretch ({stretch})"
        )
    if distribution == ONE_DOCUMENT:
        held = ([n_ranks * tokens_per_rank], *[[]] * (n_ranks - 1))
        return Batch(seed, tuple(np.array(lengths, dtype=np.int64) for lengths in held))
    lengths = sample_lengths(distribution, n_ranks * drawn_tokens, drawn_tokens, seed)
    return Batch(seed, tuple(stretch * rank for rank in take_steps(lengths, n_ranks, drawn_tokens)))


def require_whole_documents(batch: Batch, way: str) -> None:
    """Raises CannotRun if ``batch`` has a document that no rank can hold alone, as ``way`` must."""
    longest = int(batch.lengths.max())
    if longest > batch.tokens_per_rank:
        raise CannotRun(
            f"{way} keeps every document whole on one rank, which holds {batch.tokens_per_rank} "
            f"tokens, and the batch of seed {batch.seed} has one of {longest}"
        )


def packed(batch: Batch) -> list[RankManifest]:
    """Plain packing: whole documents, in order.

    Raises:
        CannotRun: one is longer than a rank.
    """
    require_whole_documents(batch, "plain packing")
    return [RankManifest(0, rank, (segments,)) for rank, segments in enumerate(_whole(batch.ranks))]


def repacked(batch: Batch) -> list[RankManifest]:
    """Whole documents at equal memory: the dearest first, each to the rank with the least work
    that has room for it. One that fits nowhere is cut; its pieces are documents of their own, which
    saves this way some work.

    Raises:
        CannotRun: one is longer than a rank.
    """
    require_whole_documents(batch, "re-packing")
    n_ranks, room = len(batch.ranks), [batch.tokens_per_rank] * len(batch.ranks)
    work = [0] * n_ranks
    bins: list[list[Segment]] = [[] for _ in range(n_ranks)]
    lengths = batch.lengths
    for document in np.argsort(-lengths, kind="stable").tolist():
        missing = int(lengths[document])
        while missing:
            fitting = [rank for rank in range(n_ranks) if room[rank] >= missing]
            rank = (
                min(fitting, key=work.__getitem__)
                if fitting
                else max(range(n_ranks), key=room.__getitem__)
            )
            taken = min(missing, room[rank])
            bins[rank].append(Segment(document, int(lengths[document]), 0, taken))
            room[rank] -= taken
            work[rank] += taken * taken
            missing -= taken
    return [RankManifest(0, rank, (tuple(segments),)) for rank, segments in enumerate(bins)]


def zigzag(batch: Batch) -> list[RankManifest]:
    """Per-document context parallelism: of 2 n pieces of every document, rank r holds piece r and
    piece 2 n - 1 - r, which together have an nth of its work."""
    n_ranks = len(batch.ranks)
    held: list[list[Segment]] = [[] for _ in range(n_ranks)]
    for document, length in enumerate(batch.lengths.tolist()):
        bounds = [length * i // (2 * n_ranks) for i in range(2 * n_ranks + 1)]
        for rank in range(n_ranks):
            for piece in (rank, 2 * n_ranks - 1 - rank):
                begin, end = bounds[piece], bounds[piece + 1]
                if end > begin:
                    held[rank].append(Segment(document, length, begin, end - begin))
    return [RankManifest(0, rank, (tuple(segments),)) for rank, segments in enumerate(held)]


def in_pairs(batch: Batch, step: int) -> list[RankManifest]:
    """Two nano-batches of whole plainly packed ranks, each laid over all ranks in order.

    Raises:
        CannotRun: a document is longer than a rank.
    """
    require_whole_documents(batch, "a layout of plainly packed ranks")
    n_ranks, half = len(batch.ranks), len(batch.ranks) // 2
    work = [int((lengths * lengths).sum()) for lengths in batch.ranks]
    order = sorted(range(n_ranks), key=work.__getitem__)
    # The dearest with the cheapest, so that both nano-batches have about the same work.
    chosen = {*order[: half // 2], *order[n_ranks - (half - half // 2) :]}
    rows = batch.tokens_per_rank // 2
    held: list[list[tuple[Segment, ...]]] = [[] for _ in range(n_ranks)]
    for nano in (chosen, set(range(n_ranks)) - chosen):
        streams = [segments for rank, segments in enumerate(_whole(batch.ranks)) if rank in nano]
        for rank, segments in enumerate(_laid(chain.from_iterable(streams), n_ranks, rows)):
            held[rank].append(segments)
    return [RankManifest(step, rank, tuple(nanos)) for rank, nanos in enumerate(held)]


def planned(
    batch: Batch,
    step: int,
    profile: CostProfile,
    options: PlanningOptions,
    n_nano_batches: int = 2,
    *,
    cuts_documents: bool = False,
) -> list[RankManifest]:
    """Nano-batches, each token where the plan of core attention moves the fewest bytes; one
    document is cut between two nano-batches if it may."""
    servers = [
        PlanningServer(
            server=PlanServer(server_id=f"rank-{rank}", in_place_rank=rank, address=""),
            host=f"rank-{rank}",
            profile=profile,
        )
        for rank in range(len(batch.ranks))
    ]
    return plan_homes(
        batch.lengths,
        len(batch.ranks),
        batch.tokens_per_rank,
        servers,
        options,
        n_nano_batches=n_nano_batches,
        cuts_documents=cuts_documents,
        step=step,
    )


def tokens_of(
    seed: int,
    segments: Sequence[Segment],
    vocabulary: int,
    device: torch.device,
    *,
    lowest: int = 0,
) -> TokenBatch:
    """Random tokens of the rows of ``segments``, from ``lowest`` to below ``vocabulary``; the same
    in every layout.

    A document that repacking has cut keeps its tokens, and its first piece its last label.
    """
    ids, positions, labels = [], [], []
    for segment in segments:
        generator = np.random.default_rng((seed, segment.document_id))
        document = generator.integers(lowest, vocabulary, segment.document_length + 1)
        document[-1] = IGNORED_LABEL
        begin, end = segment.offset, segment.offset + segment.length
        ids.append(document[begin:end])
        labels.append(document[begin + 1 : end + 1])
        positions.append(np.arange(begin, end))
    columns = (np.concatenate(column)[None].astype(np.int64) for column in (ids, positions, labels))
    return TokenBatch(*(torch.from_numpy(column).to(device) for column in columns))


def _laid(documents: Iterable[Segment], n_places: int, rows: int) -> list[tuple[Segment, ...]]:
    """Documents one after another over places of ``rows`` rows each, cut where a place ends."""
    laid: list[list[Segment]] = [[] for _ in range(n_places)]
    row = 0
    for document in documents:
        offset = 0
        while offset < document.length:
            place, at = divmod(row, rows)
            taken = min(document.length - offset, rows - at)
            laid[place].append(replace(document, offset=offset, length=taken))
            offset += taken
            row += taken
    return [tuple(segments) for segments in laid]


def _whole(ranks: Sequence[Int64Array]) -> list[tuple[Segment, ...]]:
    first, segments = 0, []
    for lengths in ranks:
        held = [Segment(first + i, length, 0, length) for i, length in enumerate(lengths.tolist())]
        segments.append(tuple(held))
        first += len(held)
    return segments
