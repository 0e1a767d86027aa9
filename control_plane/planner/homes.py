"""Planned homes: a packing of documents whose plan moves the fewest bytes.

A data loader knows the lengths before the step. If a query range that would be exported has its
*home* on the receiver instead, in exchange for as many tokens of short documents, every rank still
holds exactly its tokens, and only K and V travel: a long document simply lies on several ranks, in
pieces of about equal work, and short documents fill the ranks up. For data-parallel ranks.

A rank that holds a piece of ``q`` tokens and ``w`` seconds must still be filled up with ``T - q``
tokens of short documents, which take ``rho`` seconds a token. What counts against its cap is
therefore the *excess* ``w - rho q``, against the room ``cap - rho T``. Documents are placed by
excess, largest first, each where it fits most tightly; one that fits nowhere is cut from its end,
as large as the widest room, because K and V of a piece cost its begin and the fewest pieces cost
least. Short documents then go to the ranks that want the most work per missing token, and the last
of them are cut so that the tokens come out exactly. Where that is a long document, as when there is
no other, each rank gets two pieces, an early and a late one, so that all have about the same work.

Documents may be cut between two nano-batches: then one is, so that both have exactly their tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.errors import PlanError
from core_attention.manifest import RankManifest, Segment

FIXED_POINT_STEPS = 8
"""Rho is the density of the fillers, which are the documents of little excess, which needs rho."""
PASSES = 2
SHARE_OF_TOLERANCE = 0.4
"""How much of the tolerance the packing uses; the planner has the rest to level what is left."""
OVERFLOW_OF_TOLERANCE = 0.4
"""How much more of it a document may use that would otherwise be cut."""
TIGHT_SHARE = 0.25
"""Share of a rank's room from which a document counts as large."""
SMALL_EXCESS = 0.02
"""Documents whose excess is below this share of a rank's room are fillers."""
LONG_SHARE = 0.25
"""Share of a rank's seconds from which a document that is spread over ranks is laid in two rows."""
ALIGNMENT_TOKENS = 128


class _Part(NamedTuple):
    """A nano-batch's part of a document: ``[begin, end)``."""

    document: int
    begin: int
    end: int


@dataclass
class _RankWants:
    """A rank's wants and what it has got."""

    tokens: int
    seconds: float
    segments: list[Segment] = field(default_factory=list)


def plan_homes(
    lengths: Sequence[int] | Int64Array,
    n_ranks: int,
    tokens_per_rank: int,
    servers: Sequence[PlanningServer],
    options: PlanningOptions,
    *,
    n_nano_batches: int = 1,
    cuts_documents: bool = False,
    step: int = 0,
) -> list[RankManifest]:
    """The planned home of every token of a step.

    Args:
        lengths: tokens of each document, in any order; document i gets the id i. They sum to
            ``n_ranks * tokens_per_rank``: cut or pad the last one.
        n_ranks: data-parallel ranks, each with an in-place server among ``servers``.
        tokens_per_rank: rows of every rank.
        servers: for the cost profile and the speeds.
        options: of the planner that will plan the step; the tolerance bounds the work of a rank.
        n_nano_batches: each gets about the same number of tokens, as far as whole documents allow.
        cuts_documents: whether a document may begin in nano-batch 0 and go on in nano-batch 1, of
            two. Then both get exactly the same number.
        step: copied into the manifests.

    Returns:
        One manifest per rank.

    Raises:
        PlanError: the tokens do not add up, or a rank has no server that runs.
    """
    length = np.asarray(lengths, dtype=np.int64)
    _check(length, n_ranks, tokens_per_rank, n_nano_batches)
    speed = _speeds(servers, n_ranks)
    profile = servers[0].profile
    nano_batches = _nano_batches(
        length, n_nano_batches, cuts=cuts_documents and n_nano_batches == 2
    )
    left = np.full(n_ranks, tokens_per_rank)
    packed: list[list[tuple[Segment, ...]]] = [[] for _ in range(n_ranks)]
    for parts in nano_batches:
        rows = left
        if parts is not nano_batches[-1]:
            rows = (sum(end - begin for _, begin, end in parts) + np.arange(n_ranks)) // n_ranks
        left = left - rows
        ranks = _pack(parts, length, rows, speed, profile, options) if parts else []
        for rank, held in enumerate(ranks or [_RankWants(0, 0.0)] * n_ranks):
            packed[rank].append(tuple(held.segments))
    return [RankManifest(step, rank, tuple(nanos)) for rank, nanos in enumerate(packed)]


def _check(length: Int64Array, n_ranks: int, tokens_per_rank: int, n_nano_batches: int) -> None:
    shortest = int(length.min(initial=1))
    if min(n_ranks, tokens_per_rank, n_nano_batches, shortest) < 1:
        raise PlanError(
            f"n_ranks is {n_ranks}, tokens_per_rank {tokens_per_rank}, n_nano_batches "
            f"{n_nano_batches}, the shortest document {shortest}; each must be 1 or more"
        )
    total, wanted = int(length.sum()), n_ranks * tokens_per_rank
    if total != wanted:
        raise PlanError(f"the documents have {total} tokens; {n_ranks} ranks hold {wanted}")


def _speeds(servers: Sequence[PlanningServer], n_ranks: int) -> Float64Array:
    speed = np.zeros(n_ranks)
    for server in servers:
        rank = server.server.in_place_rank
        if rank is not None and rank < n_ranks:
            speed[rank] = server.speed
    if (speed == 0).any():
        raise PlanError(
            f"rank {int(np.flatnonzero(speed == 0)[0])} has no in-place server that runs; homes "
            "can be planned for ranks that attend to their own tokens"
        )
    return speed


def _nano_batches(length: Int64Array, n: int, *, cuts: bool) -> list[list[_Part]]:
    """Documents, longest first, each to the nano-batch that misses the most tokens."""
    parts: list[list[_Part]] = [[] for _ in range(n)]
    missing = [int(length.sum()) // n] * n
    for document in np.argsort(-length, kind="stable").tolist():
        k = max(range(n), key=missing.__getitem__)
        parts[k].append(_Part(document, 0, int(length[document])))
        missing[k] -= int(length[document])
    if cuts and any(missing):
        # The last document of a nano-batch that has too much began where tokens were missing, so it
        # has more than what is too much; and so has the longest.
        over = missing.index(min(missing))
        document, _, end = parts[over].pop(0)
        cut = missing[0] if over else end + missing[0]
        parts[0].append(_Part(document, 0, cut))
        parts[1].append(_Part(document, cut, end))
    return [sorted(nano, key=lambda part: part.begin - part.end) for nano in parts]


def _pack(
    parts: list[_Part],
    length: Int64Array,
    rows: Int64Array,
    speed: Float64Array,
    profile: CostProfile,
    options: PlanningOptions,
) -> list[_RankWants]:
    """The ranks of one nano-batch, filled with ``parts`` (longest first)."""
    _, begin, end = np.array(parts, dtype=np.int64).T
    seconds = profile.seconds(end - begin, end, Phase.FORWARD)
    total = float(seconds.sum())
    ranks: list[_RankWants] = []
    for _ in range(PASSES):
        caps = total / float(speed.sum()) * speed * (1.0 + SHARE_OF_TOLERANCE * options.tolerance)
        ranks = [_RankWants(n, cap) for n, cap in zip(rows.tolist(), caps.tolist(), strict=True)]
        _pack_within(ranks, parts, seconds, length, profile, options)
        # Pieces run at other rates than whole documents: the second pass knows the true total.
        total = float(sum((cap - rank.seconds) for cap, rank in zip(caps, ranks, strict=True)))
    return ranks


def _pack_within(
    ranks: list[_RankWants],
    parts: list[_Part],
    seconds: Float64Array,
    length: Int64Array,
    profile: CostProfile,
    options: PlanningOptions,
) -> None:
    """Fills empty ``ranks``, which want tokens and seconds, with ``parts``."""
    lengths = np.array([part.end - part.begin for part in parts], dtype=np.int64)
    caps = np.array([rank.seconds for rank in ranks])
    tokens = np.array([rank.tokens for rank in ranks])
    n_long, rho = _split_off_fillers(lengths, seconds, float(caps.mean()), tokens.mean())
    overflow = OVERFLOW_OF_TOLERANCE * options.tolerance * float(caps.mean())
    wants = _Wants(
        tokens,
        caps - rho * tokens,
        rho,
        overflow,
        TIGHT_SHARE * float(caps.mean() - rho * tokens.mean()),
    )
    shortest = max(options.min_forward_tokens, options.min_backward_tokens)
    for k in range(n_long):
        whole = int(length[parts[k].document])
        _place_long(ranks, wants, parts[k], whole, float(seconds[k]), profile, shortest)
    rest = [(parts[k], float(seconds[k])) for k in range(n_long, len(lengths))]
    _fill(ranks, rest, length, profile, LONG_SHARE * float(caps.mean()))


def _split_off_fillers(
    lengths: Int64Array, seconds: Float64Array, cap: float, tokens: float
) -> tuple[int, float]:
    """How many of the documents, longest first, are long, and rho of the others."""
    n_long = 0
    rho = float(seconds.sum() / lengths.sum())
    for _ in range(FIXED_POINT_STEPS):
        room = max(cap - rho * tokens, 0.0)
        excess = seconds - rho * lengths
        n_long = int(np.searchsorted(-excess, -SMALL_EXCESS * room))
        n_long = min(n_long, len(lengths) - 1)
        rho = float(seconds[n_long:].sum() / lengths[n_long:].sum())
    return n_long, rho


@dataclass
class _Wants:
    """The wants of the ranks, as columns: tokens, and excess against rho.

    A whole document may exceed the room by ``overflow``, rather than be cut. One whose excess is
    above ``tight_from`` goes where it fits most tightly, others where the room is widest.
    """

    tokens: Int64Array
    room: Float64Array
    rho: float
    overflow: float
    tight_from: float

    def take(self, rank: int, tokens: int, seconds: float) -> None:
        self.tokens[rank] -= tokens
        self.room[rank] -= seconds - self.rho * tokens


def _place_long(
    ranks: list[_RankWants],
    wants: _Wants,
    part: _Part,
    length: int,
    seconds: float,
    profile: CostProfile,
    shortest: int,
) -> None:
    """Places a part of a document of ``length`` tokens whole where it fits most tightly, else piece
    by piece from its end.

    Pieces have ``shortest`` tokens or more, unless no rank has as many left.
    """
    document, first, end = part
    while end > first:
        excess = seconds - wants.rho * (end - first)
        has_tokens = wants.tokens >= end - first
        fits = has_tokens & (wants.room >= excess)
        widest = int(np.where(has_tokens, wants.room, -np.inf).argmax())
        if excess <= wants.tight_from:
            # Many more like it follow: level ranks leave room for all of them.
            fits[:] = False
        if fits.any():
            at, begin = int(np.where(fits, wants.room, np.inf).argmin()), first
        elif has_tokens.any() and wants.room[widest] + wants.overflow >= excess:
            at, begin = widest, first
        else:
            at, begin = _widest_piece(wants, first, end, profile, shortest)
            seconds = float(profile.seconds(end - begin, end, Phase.FORWARD))
        _give(ranks[at], document, length, begin, end, seconds)
        wants.take(at, end - begin, seconds)
        end = begin
        if end > first:
            seconds = float(profile.seconds(end - first, end, Phase.FORWARD))


def _widest_piece(
    wants: _Wants, first: int, end: int, profile: CostProfile, shortest: int
) -> tuple[int, int]:
    """The rank with the widest room, and where the piece ``[begin, end)`` of ``[first, end)`` that
    fills it begins."""
    holds = wants.tokens >= min(end - first, shortest)
    if not holds.any():
        holds = wants.tokens > 0
    at = int(np.where(holds, wants.room, -np.inf).argmax())
    free = int(wants.tokens[at])
    begin = _begin_within(profile, end, float(wants.room[at]), wants.rho, min(free, end - first))
    begin = max(min(begin, end - shortest), end - free, first)
    if begin - first < shortest and free >= end - first:
        begin = first
    return at, begin


def _begin_within(profile: CostProfile, end: int, room: float, rho: float, free: int) -> int:
    """The begin of the longest piece ``[begin, end)`` of at most ``free`` tokens whose excess is at
    most ``room``; ``end`` if there is none. Aligned, or the earliest possible."""

    def fits(begin: int) -> bool:
        seconds = float(profile.seconds(end - begin, end, Phase.FORWARD))
        return seconds - rho * (end - begin) <= room

    low = max(end - free, 0)
    if fits(low):
        return low
    first, last = low // ALIGNMENT_TOKENS + 1, -(-end // ALIGNMENT_TOKENS)
    while first < last:
        middle = (first + last) // 2
        if fits(middle * ALIGNMENT_TOKENS):
            last = middle
        else:
            first = middle + 1
    return min(first * ALIGNMENT_TOKENS, end)


def _fill(
    ranks: list[_RankWants],
    rest: list[tuple[_Part, float]],
    length: Int64Array,
    profile: CostProfile,
    long_seconds: float,
) -> None:
    """Places short documents, longest first, on the rank that wants the most seconds a token; cuts
    those that fit nowhere."""
    wanting = [
        (-rank.seconds / rank.tokens, at) for at, rank in enumerate(ranks) if rank.tokens > 0
    ]
    heapq.heapify(wanting)
    # Ranks that miss fewer tokens than the document at hand has; most tokens first.
    waiting: list[tuple[int, int]] = []
    for part, seconds in rest:
        tokens = part.end - part.begin
        while waiting and -waiting[0][0] >= tokens:
            at = heapq.heappop(waiting)[1]
            heapq.heappush(wanting, (-ranks[at].seconds / ranks[at].tokens, at))
        while wanting and ranks[wanting[0][1]].tokens < tokens:
            at = heapq.heappop(wanting)[1]
            heapq.heappush(waiting, (-ranks[at].tokens, at))
        whole = int(length[part.document])
        if not wanting:
            _cut(ranks, waiting, part, whole, profile, n_rows=2 if seconds > long_seconds else 1)
            continue
        at = heapq.heappop(wanting)[1]
        _give(ranks[at], part.document, whole, part.begin, part.end, seconds)
        if ranks[at].tokens > 0:
            heapq.heappush(wanting, (-ranks[at].seconds / ranks[at].tokens, at))


def _cut(
    ranks: list[_RankWants],
    waiting: list[tuple[int, int]],
    part: _Part,
    length: int,
    profile: CostProfile,
    *,
    n_rows: int,
) -> None:
    """Spreads a part of a document that fits nowhere whole over the ranks that miss the most
    tokens, from its end.

    Args:
        n_rows: 1, or 2: then each rank takes half of what it misses, and the other half in the
            reverse order, so that all have about the same work.
    """
    takers = []
    missing = part.end - part.begin
    while missing > 0:
        at = heapq.heappop(waiting)[1]
        taken = min(missing, ranks[at].tokens)
        takers.append((at, taken))
        missing -= taken
    if n_rows == 2:
        early = [(at, tokens // 2) for at, tokens in reversed(takers) if tokens > 1]
        takers = [(at, tokens - tokens // 2) for at, tokens in takers] + early
    end = part.end
    for at, taken in takers:
        begin = end - taken
        seconds = float(profile.seconds(taken, end, Phase.FORWARD))
        _give(ranks[at], part.document, length, begin, end, seconds)
        end = begin
    for at in {at for at, _ in takers}:
        if ranks[at].tokens > 0:
            heapq.heappush(waiting, (-ranks[at].tokens, at))


def _give(
    rank: _RankWants, document: int, length: int, begin: int, end: int, seconds: float
) -> None:
    rank.segments.append(Segment(document, length, begin, end - begin))
    rank.tokens -= end - begin
    rank.seconds -= seconds
