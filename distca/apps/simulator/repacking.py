"""Re-packing whole documents: bins of equal work under a cap on the tokens of each bin."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from distca.apps.simulator.packing import pack_in_order
from distca.apps.simulator.profile import document_seconds

CAP_STEPS = 20
"""A cap above the even share is tried in steps of one over so many."""


@dataclass(frozen=True, eq=False)
class Bins:
    """The work of each bin of documents, in one layer.

    Attributes:
        tokens: ``[n_bins]``, a rank's share where several ranks share a bin.
        forward_seconds, backward_seconds: ``[n_bins]`` of core attention.
    """

    tokens: Float64Array
    forward_seconds: Float64Array
    backward_seconds: Float64Array

    def most_seconds(self, linear_seconds_per_token: float) -> float:
        """Seconds of the fullest bin, with its linear layers."""
        linear = self.tokens * linear_seconds_per_token
        return float(np.max(linear + self.forward_seconds + self.backward_seconds))


def bins_in_order(
    lengths: Int64Array, n_bins: int, tokens_per_bin: int, profile: CostProfile
) -> Bins:
    """Plain packing: bins filled one after another.

    A document that crosses bins keeps its whole context, its earlier keys being there for free.
    """
    manifest = pack_in_order(lengths, n_bins, tokens_per_bin, 1)
    end = manifest.segment_offset + manifest.segment_length
    forward, backward = np.zeros(n_bins), np.zeros(n_bins)
    for sums, phase in ((forward, Phase.FORWARD), (backward, Phase.BACKWARD)):
        np.add.at(sums, manifest.segment_rank, profile.seconds(manifest.segment_length, end, phase))
    return Bins(np.full(n_bins, float(tokens_per_bin)), forward, backward)


def repack(
    lengths: Int64Array,
    forward_seconds: Float64Array,
    backward_seconds: Float64Array,
    linear_seconds_per_token: float,
    n_bins: int,
    cap_tokens: int,
) -> Bins:
    """Bins of nearly equal seconds: each document, the costliest first, goes to the bin with the
    least work that has room for it (longest processing time first).

    A document that fits nowhere is cut over the bins with the least work; its pieces take seconds
    in proportion to their tokens, as if they kept their context for free. That balances better than
    a looser cap under which nothing is cut, so the best of all caps from the even share to
    ``cap_tokens`` counts: the one that leaves the least work in the fullest bin.

    Args:
        lengths: ``[n_documents]`` tokens.
        forward_seconds, backward_seconds: ``[n_documents]`` core attention of each, one layer.
        linear_seconds_per_token: of one layer, forward and backward together.
        n_bins: how many.
        cap_tokens: the most tokens that a bin may hold.
    """
    total = int(lengths.sum())
    if total > n_bins * cap_tokens:
        raise ValueError(f"{n_bins} bins of {cap_tokens} tokens cannot hold {total} tokens")
    candidates = (
        _repack_under(
            lengths, forward_seconds, backward_seconds, linear_seconds_per_token, n_bins, cap
        )
        for cap in _caps(-(-total // n_bins), cap_tokens)
    )
    return min(candidates, key=lambda bins: bins.most_seconds(linear_seconds_per_token))


def _caps(even_tokens: int, cap_tokens: int) -> list[int]:
    """From the even share on, up to the cap and with it, the tightest first."""
    between = range(even_tokens, cap_tokens, max(1, even_tokens // CAP_STEPS))
    return [*between, cap_tokens]


def _repack_under(
    lengths: Int64Array,
    forward_seconds: Float64Array,
    backward_seconds: Float64Array,
    linear_seconds_per_token: float,
    n_bins: int,
    cap_tokens: int,
) -> Bins:
    """:func:`repack` under one cap."""
    work = forward_seconds + backward_seconds + linear_seconds_per_token * lengths
    bins = _OpenBins(n_bins, cap_tokens)
    sums = np.zeros((2, n_bins))
    for document in np.argsort(-work, kind="stable").tolist():
        length = int(lengths[document])
        for at, tokens in bins.put(length, float(work[document])):
            share = tokens / length
            sums[0, at] += forward_seconds[document] * share
            sums[1, at] += backward_seconds[document] * share
    tokens_in = cap_tokens - np.array(bins.room, dtype=np.float64)
    return Bins(tokens_in, sums[0], sums[1])


def repack_whole(
    lengths: Int64Array,
    profile: CostProfile,
    linear_seconds_per_token: float,
    n_bins: int,
    cap_tokens: int,
) -> Bins:
    """:func:`repack` of documents that each run on one rank."""
    forward, backward = (document_seconds(profile, lengths, phase) for phase in Phase)
    return repack(lengths, forward, backward, linear_seconds_per_token, n_bins, cap_tokens)


class _OpenBins:
    """Bins that fill up. Documents must come longest first: a bin without room for one of them is
    set aside until documents are short enough, so that each is looked at few times."""

    def __init__(self, n_bins: int, cap_tokens: int) -> None:
        self.room = [cap_tokens] * n_bins
        self._load = [0.0] * n_bins
        self._by_load = [(0.0, at) for at in range(n_bins)]
        self._aside: list[tuple[int, int]] = []  # (-room, bin)

    def put(self, length: int, work: float) -> list[tuple[int, int]]:
        """Adds a document; returns where its tokens went, (bin, tokens): the bin with the least
        work that has room for all of it, else the bins with the least work."""
        while self._aside and -self._aside[0][0] >= length:
            _, at = heapq.heappop(self._aside)
            heapq.heappush(self._by_load, (self._load[at], at))
        while self._by_load and self.room[self._by_load[0][1]] < length:
            _, at = heapq.heappop(self._by_load)
            heapq.heappush(self._aside, (-self.room[at], at))
        if self._by_load:
            at = self._by_load[0][1]
            self._take(at, length, work)
            heapq.heapreplace(self._by_load, (self._load[at], at))
            return [(at, length)]
        return self._cut(length, work)

    def _cut(self, length: int, work: float) -> list[tuple[int, int]]:
        places = []
        missing = length
        for _, at in sorted((self._load[at], at) for _, at in self._aside):
            tokens = min(missing, self.room[at])
            if tokens:
                self._take(at, tokens, work * tokens / length)
                places.append((at, tokens))
                missing -= tokens
        self._aside = [(-self.room[at], at) for _, at in self._aside]
        heapq.heapify(self._aside)
        return places

    def _take(self, at: int, tokens: int, work: float) -> None:
        self.room[at] -= tokens
        self._load[at] += work
