"""Re-packing whole documents: bins of equal tokens and nearly equal work."""

from __future__ import annotations

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
    room, load = np.full(n_bins, bin_tokens), np.zeros(n_bins)
    sums = np.zeros((2, n_bins))
    for document in np.argsort(-work, kind="stable").tolist():
        length = missing = int(lengths[document])
        least_room = length if room.max() >= length else 1
        while missing:
            at = int(np.where(room >= least_room, load, np.inf).argmin())
            tokens = min(missing, int(room[at]))
            share = tokens / length
            room[at] -= tokens
            load[at] += work[document] * share
            sums[0, at] += forward_seconds[document] * share
            sums[1, at] += backward_seconds[document] * share
            missing -= tokens
    return Bins((bin_tokens - room).astype(np.float64), sums[0], sums[1])
