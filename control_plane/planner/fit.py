"""Fitting a chunk: from where its geometry is best to where the cut really lies.

By true seconds on the receiver's and the sender's profile, at aligned positions, and without rests
that are too short.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from control_plane.planner.chunk import (
    MOST_ESTIMATES,
    NEAR_ENOUGH,
    CutRules,
    begin_for_seconds,
)
from control_plane.planner.compiled import compiled_leaf
from control_plane.planner.costs import Pace, pace_seconds, pair_seconds


class Offer(NamedTuple):
    """A free part that a sender may give some of, and what the two servers want.

    Attributes:
        low, high: the part's queries.
        seconds: of the whole part on the sender.
        shortest: fewest queries of a chunk.
        surplus: seconds that the sender wants to be rid of.
        room: seconds that the receiver can take.
        resident: the receiver has the K and V of ``[0, resident)`` anyway.
    """

    low: int
    high: int
    seconds: float
    shortest: int
    surplus: float
    room: float
    resident: int


@compiled_leaf
def fit_best(
    rules: CutRules, sender: Pace, receiver: Pace, offer: Offer, at_end: float, n_shifts: int
) -> tuple[int, int]:
    """The chunk of :func:`_fit` with the most useful seconds per byte, for ends near ``at_end``;
    empty if none fits."""
    best_begin, best_end_at, best_value = 0, 0, 0.0
    for shift in range(-n_shifts, n_shifts + 1):
        begin, end = _fit(rules, sender, receiver, offer, at_end + shift * rules.alignment)
        if n_shifts == 0:
            # Here, as a second call would be a second copy of what it is inlined from.
            return begin, end
        if end <= begin:
            continue
        relief = offer.seconds - pace_seconds(sender, offer.low, begin)
        relief -= pace_seconds(sender, end, offer.high)
        moved = rules.q_bytes * (end - begin) + rules.kv_bytes * max(end - offer.resident, 0)
        value = min(relief, offer.surplus) / moved
        if value > best_value * (1.0 + 1e-9):
            best_begin, best_end_at, best_value = begin, end, value
    return best_begin, best_end_at


@compiled_leaf
def _fit(
    rules: CutRules, sender: Pace, receiver: Pace, offer: Offer, at_end: float
) -> tuple[int, int]:
    """The chunk of a free part that ends near ``at_end``, takes the receiver at most its room and
    relieves the sender of its surplus where that is possible; empty if none fits.

    The bytes of a chunk hardly change when it shifts by half its length, so it shifts to the
    beginning or the end of the part where it would leave less than that behind.
    """
    low, high = offer.low, offer.high
    end = min(round(at_end / rules.alignment) * rules.alignment, high)
    if end <= low:
        end = high
    begin = _begin_of_chunk(rules, sender, receiver, offer, end)
    near = max((end - begin) // 2, rules.min_rest_tokens)
    left, right = begin - low, high - end
    if 0 < left < near and (right == 0 or left <= right):
        begin = low
        end = _end_of_chunk(rules, sender, receiver, offer)
    elif 0 < right < near:
        end = high
        begin = _begin_of_chunk(rules, sender, receiver, offer, high)
    if 0 < begin - low < rules.min_rest_tokens:
        begin = low + rules.min_rest_tokens
    if 0 < high - end < rules.min_rest_tokens:
        end = high - rules.min_rest_tokens
    if end - begin < max(offer.shortest, 1):
        return 0, 0
    return begin, end


@compiled_leaf
def _begin_of_chunk(rules: CutRules, sender: Pace, receiver: Pace, offer: Offer, end: int) -> int:
    """The begin of the chunk that ends at ``end``: it fills the room, or takes the surplus,
    whichever is less; ``end`` if even the shortest does not fit."""
    low, high = offer.low, offer.high
    earliest = begin_for_seconds(receiver, low, end, offer.room, rules.alignment)
    if end - earliest < offer.shortest:
        return end
    keep = offer.seconds - pace_seconds(sender, end, high) - offer.surplus
    wanted = latest_end(sender, low, end, keep, rules.alignment)
    return max(earliest, min(wanted, end - offer.shortest))


@compiled_leaf
def _end_of_chunk(rules: CutRules, sender: Pace, receiver: Pace, offer: Offer) -> int:
    """The same for a chunk that begins where the part does: where it ends; there if none fits."""
    low, high = offer.low, offer.high
    latest = latest_end(receiver, low, high, offer.room, rules.alignment)
    if latest - low < offer.shortest:
        return low
    keep = offer.seconds - offer.surplus
    wanted = begin_for_seconds(sender, low, high, keep, rules.alignment)
    return min(latest, max(wanted, low + offer.shortest))


@compiled_leaf
def latest_end(pace: Pace, low: int, high: int, seconds: float, alignment: int) -> int:
    """The last end in ``(low, high]`` such that ``[low, end)`` takes at most ``seconds``; aligned,
    or ``high``. ``low`` if there is none."""
    if seconds <= 0.0:
        return low
    if pace_seconds(pace, low, high) <= seconds:
        return high
    first, last = low // alignment, high // alignment
    end = float(high)
    for _ in range(MOST_ESTIMATES):
        rate = pair_seconds(pace.tables, pace.profile, pace.phase, max(end - low, 1.0), end)
        before = end
        end = min(math.sqrt(float(low) * low + 2.0 * seconds * pace.speed / rate), float(high))
        if abs(end - before) < NEAR_ENOUGH * alignment:
            break
    at = min(max(int(end) // alignment, first), last)
    while at > first and pace_seconds(pace, low, at * alignment) > seconds:
        at -= 1
    while at < last and pace_seconds(pace, low, (at + 1) * alignment) <= seconds:
        at += 1
    return max(at * alignment, low)
