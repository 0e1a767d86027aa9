"""Re-packing whole documents: bins of equal tokens and nearly equal work."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from distca.apps.simulator.packing import pack_in_order


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
    *,
    linear_seconds_per_token: float,
    n_bins: int,
) -> Bins:
    """Bins of equal tokens and nearly equal seconds: each document, the costliest first, goes to
    the bin with the least work that has room for it (longest processing time first).

    A document that fits nowhere is cut over the bins with the least work; its pieces take seconds
    in proportion to their tokens, as if they kept their context for free.

    Args:
        lengths: ``[n_documents]`` tokens.
        forward_seconds, backward_seconds: ``[n_documents]`` core attention of each, one layer.
        linear_seconds_per_token: of one layer, forward and backward together.
        n_bins: how many.
    """
    work = forward_seconds + backward_seconds + linear_seconds_per_token * lengths
    bin_tokens = -(-int(lengths.sum()) // n_bins)
    bins = _OpenBins(n_bins, bin_tokens)
    sums = np.zeros((2, n_bins))
    for document in np.argsort(-work, kind="stable").tolist():
        length = int(lengths[document])
        for at, tokens in bins.put(length, float(work[document])):
            share = tokens / length
            sums[0, at] += forward_seconds[document] * share
            sums[1, at] += backward_seconds[document] * share
    return Bins(bin_tokens - np.array(bins.room, dtype=np.float64), sums[0], sums[1])


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
