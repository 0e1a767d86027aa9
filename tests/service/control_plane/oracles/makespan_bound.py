"""How early any plan can end: a proven bound on the busiest server's seconds, without a planner.

A task that must end within L seconds has few queries where its keys are many, and a kernel runs
few queries slowly. So for every L there is a least rate, seconds per query-key pair, at which the
pairs of a position of a document can run at all: the least over all tasks that hold the position,
end inside the document and take at most L on the fastest server. If all pairs at these rates come
to more than L seconds on all servers together, no plan ends within L, whatever moves where and
however documents are cut. And some task holds the last query of the longest document, and so all
its keys: no plan ends before the shortest such task on the fastest server. Bytes and memory do not
count here.

Rates come from the cost profile alone. Between the points of its grid they are bilinear in the
logarithms of queries and keys, so inside a small rectangle that no line of the grid crosses the
least rate is at a corner; a rectangle counts as possible if its fewest pairs at its least rate take
at most L.
"""

from __future__ import annotations

import numpy as np

from core_attention.arrays import BoolArray, Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile

KEYS_PER_OCTAVE, QUERIES_PER_OCTAVE = 64, 64
"""How fine rectangles are: the bound is looser by about the effect of 1% in queries and keys."""
BISECTIONS = 24


class MakespanBound:
    """The bound for documents up to ``longest`` tokens on servers of one ``profile``."""

    def __init__(self, profile: CostProfile, phase: Phase, longest: int) -> None:
        self._longest = longest
        of_last_query = profile.seconds(np.arange(1, longest + 1), longest, phase)
        self._last_query = float(of_last_query.min())
        self._keys = _edges(profile.kv_tokens, KEYS_PER_OCTAVE, longest)
        queries = _edges(profile.q_tokens, QUERIES_PER_OCTAVE, longest)
        q, keys = queries[:, None], self._keys[None, :]
        corner = _rate(profile, q, keys, phase)
        self._rate = np.minimum(
            np.minimum(corner[:-1, :-1], corner[1:, :-1]),
            np.minimum(corner[:-1, 1:], corner[1:, 1:]),
        )
        fewest = q[:-1] * (np.maximum(keys[:, :-1], q[:-1]) - (q[:-1] - 1) / 2)
        self._seconds = fewest * self._rate
        self._exists: BoolArray = q[:-1] <= keys[:, 1:]

    def least_seconds(self, lengths: Int64Array, speeds: Float64Array) -> float:
        """No plan of documents of ``lengths`` tokens ends earlier on servers of ``speeds``."""
        pairs = self._pairs(lengths)
        low, high = 0.0, self._needed(pairs, np.inf) / float(speeds.max())
        if int(lengths.max()) == self._longest:
            low = self._last_query / float(speeds.max())
            high = max(low, high)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            needed = self._needed(pairs, middle * float(speeds.max()))
            if needed > middle * float(speeds.sum()):
                low = middle
            else:
                high = middle
        return low

    def _pairs(self, lengths: Int64Array) -> Float64Array:
        """``[class, interval]`` query-key pairs at the positions of each interval, of documents
        that end in each."""
        edges = self._keys
        ends_in = np.clip(np.searchsorted(edges, lengths, side="left") - 1, 0, len(edges) - 2)
        pairs = np.zeros((len(edges) - 1, len(edges) - 1))
        # Positions up to an edge: those up to its whole tokens.
        until = np.floor(edges)
        full = until * (until + 1) / 2
        for at in np.unique(ends_in):
            of_class = lengths[ends_in == at].astype(np.float64)
            pairs[at, :at] = len(of_class) * np.diff(full[: at + 1])
            pairs[at, 0] += len(of_class) * full[0] * (at > 0)
            before = full[at] if at else 0.0
            pairs[at, at] = (of_class * (of_class + 1) / 2 - before).sum()
        return pairs

    def _needed(self, pairs: Float64Array, most_seconds: float) -> float:
        """Seconds of all pairs at speed 1 if no task may take more than ``most_seconds``."""
        possible = self._exists & (self._seconds <= most_seconds)
        of_end = np.where(possible, self._rate, np.inf).min(axis=0)
        needed = 0.0
        for at in np.flatnonzero(pairs.any(axis=1)):
            # A task that holds a position ends there or later, but inside the document.
            least = np.minimum.accumulate(of_end[: at + 1][::-1])[::-1]
            some = pairs[at, : at + 1] > 0
            needed += float((pairs[at, : at + 1][some] * least[some]).sum())
        return needed


def _edges(grid: Int64Array, per_octave: int, longest: int) -> Float64Array:
    """Bounds of small intervals from 1 to ``longest`` that hold every point of ``grid``."""
    fine = 2.0 ** (np.arange(0, 32 * per_octave + 1) / per_octave)
    edges = np.union1d(fine, grid.astype(np.float64))
    edges = edges[edges < longest]
    return np.append(edges, float(max(longest, 2)))


def _rate(profile: CostProfile, q: Float64Array, keys: Float64Array, phase: Phase) -> Float64Array:
    """Seconds per pair of ``q`` queries of ``keys`` keys, as the profile has it."""
    pairs = q * (keys - (q - 1) / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = profile.seconds(q, keys, phase) / pairs
    # More queries than keys: corners of rectangles that hold no task, or that the line crosses.
    return np.asarray(np.where(pairs > 0, rate, np.inf))
