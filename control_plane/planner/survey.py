"""One look at every segment of a step: what it takes to run where it is at home.

Both phases, all nano-batches and the forecasts begin with it. There are tens of thousands of
segments and a few hundred of anything else, so what can be summed up here is not looked for again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from control_plane.planner.board import Segments
from control_plane.planner.compiled import BoolArray, compiled, compiled_leaf
from control_plane.planner.costs import (
    BACKWARD,
    FORWARD,
    UNCUT_TOKENS,
    causal_pairs,
    pair_seconds_of_both,
)
from control_plane.planner.fleet import Fleet
from core_attention.arrays import Float64Array, Int64Array
from core_attention.manifest import Manifest


class Survey(NamedTuple):
    """The segments of a manifest, and the sums over them.

    Seconds are those of the rank's in-place server, by its profile and speed; at speed 1 if it has
    none, and by the first server's profile if there is no in-place server.

    Attributes:
        seconds: ``[2, n_segments]`` of each segment at home, forward and backward.
        end: ``[n_segments]`` where each ends in its document.
        whole: ``[n_segments]`` whether it is its whole document.
        rank_seconds: ``[2, n_nano_batches, n_ranks]`` sums of ``seconds``.
        longest: ``[n_nano_batches, n_ranks]`` where each rank's longest document ends.
        pairs: ``[n_nano_batches]`` query-key pairs of all segments.
        moment: ``[n_nano_batches]`` sum over the segments of pairs times end.
    """

    seconds: Float64Array
    end: Int64Array
    whole: BoolArray
    rank_seconds: Float64Array
    longest: Int64Array
    pairs: Float64Array
    moment: Float64Array


class HomeWork(NamedTuple):
    """What a nano-batch takes in one phase if every segment runs at home.

    Attributes:
        seconds: ``[n_segments]`` as in ``Survey``.
        rank_seconds, longest: ``[n_ranks]`` as in ``Survey``.
        mean_end: where a typical query-key pair's segment ends: the mean, weighted by pairs.
    """

    seconds: Float64Array
    rank_seconds: Float64Array
    longest: Int64Array
    mean_end: float


class NanoBatch(NamedTuple):
    """The segments of a nano-batch, and what they take.

    Attributes:
        low: index in the manifest of the first segment.
        segments: all of them.
        home: forward and backward.
    """

    low: int
    segments: Segments
    home: tuple[HomeWork, HomeWork]


def survey(manifest: Manifest, fleet: Fleet) -> Survey:
    """Looks at every segment of ``manifest``."""
    n, n_nano, n_ranks = manifest.n_segments, manifest.n_nano_batches, manifest.n_ranks
    found = Survey(
        seconds=np.empty((2, n)),
        end=np.empty(n, dtype=np.int64),
        whole=np.empty(n, dtype=np.bool_),
        rank_seconds=np.zeros((2, n_nano, n_ranks)),
        longest=np.zeros((n_nano, n_ranks), dtype=np.int64),
        pairs=np.zeros(n_nano),
        moment=np.zeros(n_nano),
    )
    _look(
        _bounds(manifest),
        manifest.segment_document,
        manifest.segment_offset,
        manifest.segment_length,
        manifest.segment_rank,
        manifest.document_length,
        fleet,
        found,
    )
    return found


def nano_batches(manifest: Manifest, found: Survey) -> list[NanoBatch]:
    """The nano-batches that have any segments.

    Documents are sorted by nano-batch, so these are slices."""
    batches = []
    for nano, (low, high) in enumerate(pairwise(_bounds(manifest).tolist())):
        if high == low:
            continue
        segments = Segments(
            document=manifest.segment_document[low:high],
            begin=manifest.segment_offset[low:high],
            end=found.end[low:high],
            rank=manifest.segment_rank[low:high],
            whole=found.whole[low:high],
            first_of_document=manifest.first_segment - low if low else manifest.first_segment,
        )
        mean_end = float(found.moment[nano] / found.pairs[nano])
        forward, backward = (
            HomeWork(
                found.seconds[phase, low:high],
                found.rank_seconds[phase, nano],
                found.longest[nano],
                mean_end,
            )
            for phase in (FORWARD, BACKWARD)
        )
        batches.append(NanoBatch(low, segments, (forward, backward)))
    return batches


def _bounds(manifest: Manifest) -> Int64Array:
    """``[n_nano_batches + 1]`` first segment of every nano-batch, then the number of segments."""
    nano_batches = np.arange(manifest.n_nano_batches + 1)
    return manifest.first_segment[np.searchsorted(manifest.document_nano_batch, nano_batches)]


@compiled
def _look(
    bounds: Int64Array,
    document: Int64Array,
    offset: Int64Array,
    length: Int64Array,
    rank: Int64Array,
    document_length: Int64Array,
    fleet: Fleet,
    found: Survey,
) -> None:
    for nano in range(len(bounds) - 1):
        _look_at(
            nano,
            bounds[nano],
            bounds[nano + 1],
            document,
            offset,
            length,
            rank,
            document_length,
            fleet,
            found,
        )


@compiled_leaf
def _look_at(
    nano: int,
    low: int,
    high: int,
    document: Int64Array,
    offset: Int64Array,
    length: Int64Array,
    rank: Int64Array,
    document_length: Int64Array,
    fleet: Fleet,
    found: Survey,
) -> None:
    """The segments ``[low, high)``, all of nano-batch ``nano``."""
    pairs = moment = 0.0
    # Neighbours mostly share a rank: its sums are kept out of memory while they do.
    at, profile, speed = -1, 0, 1.0
    forward_sum = backward_sum = 0.0
    longest = 0
    for i in range(low, high):
        if rank[i] != at:
            if at >= 0:
                found.rank_seconds[FORWARD, nano, at] += forward_sum
                found.rank_seconds[BACKWARD, nano, at] += backward_sum
                found.longest[nano, at] = max(found.longest[nano, at], longest)
            at = rank[i]
            forward_sum = backward_sum = 0.0
            longest = 0
            server = fleet.server_of_rank[at]
            profile, speed = fleet.profile[max(server, 0)], 1.0
            if server >= 0 and fleet.speed[server] > 0.0:
                speed = fleet.speed[server]
        begin, end = offset[i], offset[i] + length[i]
        if begin == 0 and end < UNCUT_TOKENS:
            forward = fleet.uncut_rates[profile, end, FORWARD]
            backward = fleet.uncut_rates[profile, end, BACKWARD]
        else:
            forward, backward = pair_seconds_of_both(
                fleet.tables, profile, float(length[i]), float(end)
            )
        work = causal_pairs(begin, end) / speed
        forward_sum += work * forward
        backward_sum += work * backward
        longest = max(longest, end)
        found.seconds[FORWARD, i], found.seconds[BACKWARD, i] = work * forward, work * backward
        found.end[i] = end
        found.whole[i] = length[i] == document_length[document[i]]
        held = 0.5 * (float(end) * end - float(begin) * begin)
        pairs += held
        moment += held * end
    if at >= 0:
        found.rank_seconds[FORWARD, nano, at] += forward_sum
        found.rank_seconds[BACKWARD, nano, at] += backward_sum
        found.longest[nano, at] = max(found.longest[nano, at], longest)
    found.pairs[nano], found.moment[nano] = pairs, moment
