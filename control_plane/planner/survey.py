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
from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.manifest import Manifest


class Survey(NamedTuple):
    """The segments of a manifest, and the sums over them.

    Seconds are those of the rank's in-place server, by its profile and speed; at speed 1 if it has
    none, and by the first server's profile if there is no in-place server.

    Attributes:
        bounds: ``[n_nano_batches + 1]`` first segment of every nano-batch, then the number of
            segments.
        seconds: ``[2, n_segments]`` of each segment at home, forward and backward.
        end: ``[n_segments]`` where each ends in its document.
        whole: ``[n_segments]`` whether it is its whole document.
        divided: whether any is not.
        rank_seconds: ``[n_nano_batches, 2, n_ranks]`` sums of ``seconds``.
        longest: ``[n_nano_batches, n_ranks]`` where each rank's longest document ends.
        mean_end: ``[n_nano_batches]`` where a typical query-key pair's segment ends: the mean,
            weighted by pairs; 0 where there are none.
    """

    bounds: Int64Array
    seconds: Float64Array
    end: Int64Array
    whole: BoolArray
    divided: bool
    rank_seconds: Float64Array
    longest: Int64Array
    mean_end: Float64Array


class HomeWork(NamedTuple):
    """The work of a nano-batch in one phase if every segment runs at home.

    Attributes:
        seconds: ``[n_segments]`` as in ``Survey``.
        rank_seconds, longest: ``[n_ranks]`` as in ``Survey``.
        mean_end: as in ``Survey``.
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


class Columns(NamedTuple):
    """The segments of one nano-batch, and their seconds, which are to be filled in."""

    begin: Int64Array
    end: Int64Array
    rank: Int64Array
    divided: bool
    forward: Float64Array
    backward: Float64Array


def is_divided(manifest: Manifest) -> bool:
    """Return whether any segment is not its whole document."""
    return manifest.n_segments > manifest.n_documents or manifest.n_carried > 0


def survey(manifest: Manifest, fleet: Fleet) -> Survey:
    """Looks at every segment of ``manifest``."""
    n, n_nano, n_ranks = manifest.n_segments, manifest.n_nano_batches, manifest.n_ranks
    whole, end = np.ones(n, dtype=np.bool_), manifest.segment_length
    divided = is_divided(manifest)
    if divided:
        whole = manifest.segment_length == manifest.document_length[manifest.segment_document]
        end = frozen(manifest.segment_offset + manifest.segment_length)
    nano_batches = np.arange(n_nano + 1)
    found = Survey(
        bounds=manifest.first_segment[manifest.document_nano_batch.searchsorted(nano_batches)],
        seconds=np.empty((2, n)),
        end=end,
        whole=whole,
        divided=divided,
        rank_seconds=np.zeros((n_nano, 2, n_ranks)),
        longest=np.zeros((n_nano, n_ranks), dtype=np.int64),
        mean_end=np.zeros(n_nano),
    )
    for nano, (low, high) in enumerate(pairwise(found.bounds.tolist())):
        columns = Columns(
            manifest.segment_offset[low:high],
            found.end[low:high],
            manifest.segment_rank[low:high],
            divided,
            found.seconds[FORWARD, low:high],
            found.seconds[BACKWARD, low:high],
        )
        sums = found.rank_seconds[nano], found.longest[nano]
        found.mean_end[nano] = look(columns, fleet, *sums)
    return found


def nano_batches(manifest: Manifest, found: Survey) -> list[NanoBatch]:
    """The nano-batches that have any segments.

    Documents are sorted by nano-batch, so these are slices."""
    batches = []
    for nano, (low, high) in enumerate(pairwise(found.bounds.tolist())):
        if high == low:
            continue
        segments = Segments(
            document=manifest.segment_document[low:high],
            begin=manifest.segment_offset[low:high],
            end=found.end[low:high],
            rank=manifest.segment_rank[low:high],
            whole=found.whole[low:high],
            divided=found.divided,
            first_of_document=_counted_from(low, manifest.first_segment),
        )
        forward, backward = (
            HomeWork(
                found.seconds[phase, low:high],
                found.rank_seconds[nano, phase],
                found.longest[nano],
                float(found.mean_end[nano]),
            )
            for phase in (FORWARD, BACKWARD)
        )
        batches.append(NanoBatch(low, segments, (forward, backward)))
    return batches


def _counted_from(low: int, first_segment: Int64Array) -> Int64Array:
    """Read-only in either case: for another kind of array, functions would be compiled again."""
    return frozen(first_segment - low) if low else first_segment


@compiled
def look(segments: Columns, fleet: Fleet, rank_seconds: Float64Array, longest: Int64Array) -> float:
    """Fills in the seconds and adds up those of each rank; returns the mean end."""
    long = np.empty(len(segments.begin), dtype=np.int64)
    n_long, mean_end = _fill_seconds(segments, fleet, rank_seconds, longest, long)
    _fill_long(segments, fleet, rank_seconds, longest, long[:n_long])
    return mean_end


@compiled_leaf
def _fill_seconds(
    segments: Columns,
    fleet: Fleet,
    rank_seconds: Float64Array,
    longest: Int64Array,
    long: Int64Array,
) -> tuple[int, float]:
    """All but the segments whose rates are in no table: they are written to ``long``. Returns how
    many these are, and the mean end of all."""
    n_long = 0
    pairs = moment = 0.0
    # Neighbours mostly share a rank: its sums are kept out of memory while they do.
    rank, profile, slowness = -1, 0, 1.0
    forward, backward, last = 0.0, 0.0, 0
    for i in range(len(segments.begin)):
        if segments.rank[i] != rank:
            if rank >= 0:
                rank_seconds[FORWARD, rank] += forward
                rank_seconds[BACKWARD, rank] += backward
                longest[rank] = max(longest[rank], last)
            rank = segments.rank[i]
            profile, slowness = _home(fleet, rank)
            forward, backward, last = 0.0, 0.0, 0
        begin, end = segments.begin[i] if segments.divided else 0, segments.end[i]
        held = 0.5 * (float(end) * end - float(begin) * begin)
        pairs += held
        moment += held * end
        if begin > 0 or end >= UNCUT_TOKENS:
            long[n_long] = i
            n_long += 1
            continue
        work = causal_pairs(0, end) * slowness
        segments.forward[i] = work * fleet.uncut_rates[profile, end, FORWARD]
        segments.backward[i] = work * fleet.uncut_rates[profile, end, BACKWARD]
        forward += segments.forward[i]
        backward += segments.backward[i]
        last = max(last, end)
    if rank >= 0:
        rank_seconds[FORWARD, rank] += forward
        rank_seconds[BACKWARD, rank] += backward
        longest[rank] = max(longest[rank], last)
    return n_long, moment / pairs if pairs > 0.0 else 0.0


@compiled_leaf
def _fill_long(
    segments: Columns,
    fleet: Fleet,
    rank_seconds: Float64Array,
    longest: Int64Array,
    long: Int64Array,
) -> None:
    """The segments ``long``."""
    for i in long:
        begin, end, rank = segments.begin[i], segments.end[i], segments.rank[i]
        profile, slowness = _home(fleet, rank)
        rates = pair_seconds_of_both(fleet.tables, profile, float(end - begin), float(end))
        work = causal_pairs(begin, end) * slowness
        segments.forward[i], segments.backward[i] = work * rates[FORWARD], work * rates[BACKWARD]
        rank_seconds[FORWARD, rank] += segments.forward[i]
        rank_seconds[BACKWARD, rank] += segments.backward[i]
        longest[rank] = max(longest[rank], end)


@compiled_leaf
def _home(fleet: Fleet, rank: int) -> tuple[int, float]:
    """The profile by which segments of ``rank`` run at home, and the inverse of the speed."""
    server = fleet.server_of_rank[rank]
    runs = server >= 0 and fleet.speed[server] > 0.0
    return fleet.profile[max(server, 0)], 1.0 / fleet.speed[server] if runs else 1.0
