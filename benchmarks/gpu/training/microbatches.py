"""The documents of a pipeline's step, and which microbatch holds which.

All ways train on the same documents, each whole in one microbatch of a fixed number of tokens.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from benchmarks.gpu.training.batches import Batch
from core_attention.arrays import Int64Array
from core_attention.manifest import Segment
from distca.apps.simulator.lengths import sample_lengths
from distca.apps.simulator.packing import take_steps
from trainer_client.turns.parts import neighbours, segments_of

Layout = tuple[tuple[int, ...], ...]
"""By microbatch, the documents that it holds, in the order of its rows."""

_EVEN_ENOUGH = 1e-3
"""Of the mean sum of squares: smaller differences are left as they are."""
_LARGE_SHARE = 16
"""Documents of more than this part of a microbatch are placed before all others."""
_STARTS, _ROUNDS = 4, 20
_TRIPLES_UP_TO = 48
"""Documents of a microbatch of which sets of three are exchanged as well."""


def draw_microbatches(
    seed: int, n_microbatches: int, tokens: int, distribution: str, longest: int
) -> Batch:
    """A step of documents as they come; ``ranks`` of the batch are its microbatches.

    The document that crosses the end of a microbatch is cut there, for all ways.

    Args:
        seed: of the lengths and tokens.
        n_microbatches: to fill.
        tokens: of each.
        distribution: of the lengths, see ``distca.apps.simulator.lengths``.
        longest: longer documents are cut to it.
    """
    lengths = sample_lengths(distribution, n_microbatches * tokens, longest, seed)
    return Batch(seed, tuple(take_steps(lengths, n_microbatches, tokens)))


def as_drawn(batch: Batch) -> Layout:
    """The documents as they come."""
    ends = np.cumsum([len(held) for held in batch.ranks])
    return tuple(
        tuple(range(int(end) - len(held), int(end)))
        for held, end in zip(batch.ranks, ends, strict=True)
    )


def evenly(batch: Batch) -> Layout:
    """Whole documents with nearly equal sums of squares in all microbatches, each of which has as
    many tokens as before.

    Large documents go, the largest first, where the sum is least; the others fill up what is left,
    the shortest where the sum is largest. Then sets of up to three documents with equally many
    tokens are exchanged between any two microbatches for as long as that helps. Of several such
    starts, and of the documents as they come, the best end is taken.
    """
    lengths = batch.lengths
    generator = np.random.default_rng(batch.seed)
    starts = [_filled(batch, generator if i else None) for i in range(_STARTS)]
    ends = [
        _exchanged(layout, lengths) for layout in (as_drawn(batch), *starts) if layout is not None
    ]
    return min(ends, key=lambda layout: float(np.var(squares(layout, lengths))))


def unevenness(layout: Layout, lengths: Int64Array) -> float:
    """Sums of squares of the microbatches, largest over mean."""
    sums = squares(layout, lengths)
    return float(max(sums) / np.mean(sums))


def squares(layout: Layout, lengths: Int64Array) -> list[int]:
    """Sum of squares of each microbatch."""
    return [int((lengths[list(held)] ** 2).sum()) for held in layout]


def in_halves(held: Sequence[int], lengths: Int64Array) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The documents of a microbatch as two nano-batches whose tokens, and sums of squares, differ
    little. A document lies in one of them, so a long one makes them unequal; one alone leaves the
    second empty."""
    length = lengths[list(held)].astype(np.float64)
    weight = np.stack([length / length.sum(), 0.5 * length**2 / (length**2).sum()])
    side = np.ones(len(held))
    balance = np.zeros(2)
    for at in np.argsort(-length, kind="stable"):
        side[at] = min((1.0, -1.0), key=lambda s: float(np.abs(balance + s * weight[:, at]).sum()))
        balance += side[at] * weight[:, at]
    while True:
        signed = side * weight
        # One document to the other side, or two that change places.
        alone = np.abs(balance[:, None] - 2 * signed).sum(axis=0)
        both = np.abs(balance[:, None, None] - 2 * (signed[:, :, None] + signed[:, None])).sum(0)
        np.fill_diagonal(both, alone)
        i, j = np.unravel_index(int(both.argmin()), both.shape)
        if both[i, j] >= np.abs(balance).sum() - 1e-12:
            break
        side[list({int(i), int(j)})] *= -1
        balance = (side * weight).sum(axis=1)
    first, second = (
        tuple(document for document, its in zip(held, side, strict=True) if its == sign)
        for sign in (1.0, -1.0)
    )
    return (first, second) if first else (second, first)


def cut_in_halves(
    held: Sequence[int], lengths: Int64Array
) -> tuple[tuple[Segment, ...], tuple[Segment, ...]]:
    """The documents of a microbatch as two nano-batches of equal tokens, of which the first may end
    inside a document that goes on in the second; query-key pairs are as even as simple ways of
    laying them out make them."""
    tokens = int(lengths[list(held)].sum())
    longest = max(held, key=lambda document: int(lengths[document]))
    # Its queries up to L / sqrt(2) have half of its pairs: so many of its tokens are to come first.
    room = tokens / 2 - float(lengths[longest]) / math.sqrt(2)
    before: list[int] = []
    for document in sorted(held, key=lambda document: -int(lengths[document])):
        if document != longest and lengths[document] <= room:
            before.append(document)
            room -= float(lengths[document])
    around = [*before, longest, *(d for d in held if d != longest and d not in before)]
    rows = (around, list(itertools.chain(*in_halves(held, lengths))))
    parts = neighbours([tokens // 2, tokens - tokens // 2])
    cut = (segments_of([int(lengths[d]) for d in row], parts, iter(row)) for row in rows)
    first, second = min(cut, key=_most_pairs)
    return tuple(first), tuple(second)


def _most_pairs(halves: Sequence[Sequence[Segment]]) -> int:
    return max(sum(s.length * (2 * s.offset + s.length) for s in half) for half in halves)


def _filled(batch: Batch, generator: np.random.Generator | None) -> Layout | None:
    """Large documents spread, the others chosen so that every microbatch is full; None if they
    cannot be. With a generator, small ones are looked at in random order."""
    lengths, tokens = batch.lengths, batch.tokens_per_rank
    n_bins = len(batch.ranks)
    bins: list[list[int]] = [[] for _ in range(n_bins)]
    room, load = [tokens] * n_bins, [0] * n_bins
    order = np.argsort(-lengths, kind="stable").tolist()
    for document in order:
        length = int(lengths[document])
        if length <= tokens // _LARGE_SHARE:
            break
        fitting = [at for at in range(n_bins) if room[at] >= length]
        if not fitting:
            return None
        at = min(fitting, key=load.__getitem__)
        bins[at].append(document)
        room[at] -= length
        load[at] += length * length
    placed = set(itertools.chain.from_iterable(bins))
    pool = [document for document in reversed(order) if document not in placed]
    by_load = sorted(range(n_bins), key=load.__getitem__, reverse=True)
    for at in by_load[:-1]:
        if generator is not None:
            pool = [pool[i] for i in generator.permutation(len(pool))]
        chosen = _subset(pool, lengths, room[at])
        if chosen is None:
            return None
        bins[at] += chosen
        taken = set(chosen)
        pool = [document for document in pool if document not in taken]
    bins[by_load[-1]] += pool
    return tuple(map(tuple, bins))


def _subset(pool: Sequence[int], lengths: Int64Array, total: int) -> list[int] | None:
    """Documents of ``pool`` with exactly ``total`` tokens, from as few of its first ones as
    possible; None if there are none."""
    reached, mask = [1], (1 << (total + 1)) - 1
    for document in pool:
        if reached[-1] >> total & 1:
            break
        reached.append((reached[-1] | reached[-1] << int(lengths[document])) & mask)
    if not reached[-1] >> total & 1:
        return None
    chosen, left = [], total
    for at in range(len(reached) - 1, 0, -1):
        if not reached[at - 1] >> left & 1:
            chosen.append(pool[at - 1])
            left -= int(lengths[pool[at - 1]])
    return chosen


def _exchanged(layout: Layout, lengths: Int64Array) -> Layout:
    """``layout`` after exchanges of equally many tokens that make its sums of squares more even."""
    bins = [_Sets(held, lengths) for held in layout]
    enough = _EVEN_ENOUGH * float(np.mean([its.total for its in bins]))
    for _ in range(_ROUNDS):
        exchanged = False
        for a, b in itertools.combinations(range(len(bins)), 2):
            more, less = (a, b) if bins[a].total > bins[b].total else (b, a)
            found = _exchange(bins[more], bins[less], enough)
            if found is not None:
                bins[more], bins[less] = (_Sets(held, lengths) for held in found)
                exchanged = True
        if not exchanged:
            break
    return tuple(its.held for its in bins)


def _exchange(
    more: _Sets, less: _Sets, enough: float
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Both microbatches after the exchange that brings their sums of squares closest; None if none
    brings them closer by ``enough``."""
    gap = more.total - less.total
    # The sets of the lighter one, by tokens and then squares: the best for one that is given is
    # next to what would halve the gap.
    key = less.tokens * _BASE + less.squares
    order = np.argsort(key)
    wanted = np.clip(more.squares - gap // 2, 0, _BASE - 1)
    at = np.searchsorted(key[order], more.tokens * _BASE + wanted)
    best = (gap - enough, 0, 0)
    for near in (at - 1, at):
        place = order[np.clip(near, 0, len(order) - 1)]
        moved = more.squares - less.squares[place]
        after = np.where(less.tokens[place] == more.tokens, np.abs(gap - 2 * moved), gap)
        i = int(after.argmin())
        best = min(best, (int(after[i]), i, int(place[i])))
    if best[0] >= gap - enough:
        return None
    given, taken = more.members(best[1]), less.members(best[2])
    return (*(d for d in more.held if d not in given), *taken), (
        *(d for d in less.held if d not in taken),
        *given,
    )


_BASE = 2**40
"""More than the squares of three documents of a microbatch."""


class _Sets:
    """All sets of one, two or three documents of a microbatch.

    Attributes:
        held: its documents.
        total: their sum of squares.
        tokens, squares: ``[n_sets]`` of each set.
    """

    def __init__(self, held: tuple[int, ...], lengths: Int64Array) -> None:
        self.held = held
        # Sets are filled up with a document of no tokens.
        length = np.append(lengths[list(held)], 0)
        self.total = int((length**2).sum())
        self._sets = _sets_of(len(held))
        self.tokens = length[self._sets].sum(axis=1)
        self.squares = (length[self._sets] ** 2).sum(axis=1)

    def members(self, at: int) -> list[int]:
        """The documents of a set."""
        return [self.held[i] for i in self._sets[at].tolist() if i < len(self.held)]


@lru_cache(maxsize=256)
def _sets_of(n: int) -> Int64Array:
    """``[n_sets, 2 or 3]`` numbers below n, or n where a set is smaller."""
    most = 3 if n <= _TRIPLES_UP_TO else 2
    rows = [
        (*each, *[n] * (most - size))
        for size in range(1, most + 1)
        for each in itertools.combinations(range(n), size)
    ]
    return np.array(rows, dtype=np.int64).reshape(len(rows), most)
