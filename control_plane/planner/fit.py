"""Fitting a chunk: from where its geometry is best to where the cut really lies.

By true seconds on the receiver's and the donor's profile, at aligned positions, and without rests
that are too short.
"""

from __future__ import annotations

from control_plane.planner.board import Board, Segments, server_seconds
from control_plane.planner.chunk import CutRules, begin_for_seconds
from control_plane.planner.compiled import compiled_inner
from control_plane.planner.costs import CostTables, task_seconds
from control_plane.planner.fleet import Fleet


@compiled_inner
def fit_best(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    part: int,
    at_end: float,
    room: float,
    surplus: float,
    receiver: int,
    donor: int,
    resident: int,
    n_shifts: int,
) -> tuple[int, int]:
    """The chunk of :func:`_fit` with the most useful seconds per byte, for ends near ``at_end``."""
    best_begin, best_end_at, best_value = 0, 0, 0.0
    low, high = board.free_begin[part], board.free_end[part]
    for shift in range(-n_shifts, n_shifts + 1):
        begin, end = _fit(
            board,
            segments,
            fleet,
            rules,
            part,
            at_end + shift * rules.alignment,
            room,
            surplus,
            receiver,
            donor,
        )
        if end <= begin:
            continue
        if n_shifts == 0:
            return begin, end
        relief = server_seconds(fleet, donor, rules.phase, low, high)
        relief -= server_seconds(fleet, donor, rules.phase, end, high)
        relief -= server_seconds(fleet, donor, rules.phase, low, begin)
        moved = rules.q_bytes * (end - begin) + rules.kv_bytes * max(end - resident, 0)
        value = min(relief, surplus) / moved
        if value > best_value * (1.0 + 1e-9):
            best_begin, best_end_at, best_value = begin, end, value
    return best_begin, best_end_at


@compiled_inner
def _fit(
    board: Board,
    segments: Segments,
    fleet: Fleet,
    rules: CutRules,
    part: int,
    at_end: float,
    room: float,
    surplus: float,
    receiver: int,
    donor: int,
) -> tuple[int, int]:
    """The chunk of a free part that ends near ``at_end``, takes the receiver at most ``room`` and
    relieves the donor of ``surplus`` where that is possible; empty if none fits.

    The bytes of a chunk hardly change when it shifts by half its length, so it shifts to the
    beginning or the end of the part where it would leave less than that behind.
    """
    low, high = board.free_begin[part], board.free_end[part]
    whole = (
        segments.whole[board.free_segment[part]]
        and high - low == segments.end[board.free_segment[part]]
    )
    shortest = min(rules.min_tokens, high - low) if whole else rules.min_tokens
    end = min(round(at_end / rules.alignment) * rules.alignment, high)
    if end <= low:
        end = high
    begin = _begin_of_chunk(fleet, rules, receiver, donor, low, end, high, room, surplus, shortest)
    near = max((end - begin) // 2, rules.min_rest_tokens)
    left, right = begin - low, high - end
    if 0 < left < near and (right == 0 or left <= right):
        begin = low
        end = _end_of_chunk(fleet, rules, receiver, donor, low, high, room, surplus, shortest)
    elif 0 < right < near:
        end = high
        begin = _begin_of_chunk(
            fleet, rules, receiver, donor, low, high, high, room, surplus, shortest
        )
    if 0 < begin - low < rules.min_rest_tokens:
        begin = low + rules.min_rest_tokens
    if 0 < high - end < rules.min_rest_tokens:
        end = high - rules.min_rest_tokens
    if end - begin < max(shortest, 1):
        return 0, 0
    return begin, end


@compiled_inner
def _begin_of_chunk(
    fleet: Fleet,
    rules: CutRules,
    receiver: int,
    donor: int,
    low: int,
    end: int,
    high: int,
    room: float,
    surplus: float,
    shortest: int,
) -> int:
    """Where the chunk of ``[low, high)`` that ends at ``end`` begins: it fills the room, or takes
    the surplus, whichever is less; ``end`` if even the shortest does not fit."""
    phase = rules.phase
    earliest = begin_for_seconds(
        fleet.tables,
        fleet.profile[receiver],
        phase,
        low,
        end,
        room * fleet.speed[receiver],
        rules.alignment,
    )
    if end - earliest < shortest:
        return end
    profile, speed = fleet.profile[donor], fleet.speed[donor]
    before = task_seconds(fleet.tables, profile, phase, low, high)
    after_end = task_seconds(fleet.tables, profile, phase, end, high)
    keep = before - after_end - surplus * speed
    wanted = _latest_end(fleet.tables, profile, phase, low, end, keep, rules.alignment)
    return max(earliest, min(wanted, end - shortest))


@compiled_inner
def _end_of_chunk(
    fleet: Fleet,
    rules: CutRules,
    receiver: int,
    donor: int,
    low: int,
    high: int,
    room: float,
    surplus: float,
    shortest: int,
) -> int:
    """The same for a chunk that begins at ``low``: where it ends; ``low`` if none fits."""
    phase = rules.phase
    latest = _latest_end(
        fleet.tables,
        fleet.profile[receiver],
        phase,
        low,
        high,
        room * fleet.speed[receiver],
        rules.alignment,
    )
    if latest - low < shortest:
        return low
    profile, speed = fleet.profile[donor], fleet.speed[donor]
    keep = task_seconds(fleet.tables, profile, phase, low, high) - surplus * speed
    wanted = begin_for_seconds(fleet.tables, profile, phase, low, high, keep, rules.alignment)
    return min(latest, max(wanted, low + shortest))


@compiled_inner
def _latest_end(
    tables: CostTables,
    profile: int,
    phase: int,
    low: int,
    high: int,
    seconds: float,
    alignment: int,
) -> int:
    """The last end in ``(low, high]`` such that ``[low, end)`` takes at most ``seconds`` on
    ``profile``; aligned, or ``high``. ``low`` if there is none."""
    if seconds <= 0.0:
        return low
    if task_seconds(tables, profile, phase, low, high) <= seconds:
        return high
    first, last = low // alignment, high // alignment
    while first < last:
        middle = (first + last + 1) // 2
        if task_seconds(tables, profile, phase, low, middle * alignment) <= seconds:
            first = middle
        else:
            last = middle - 1
    return max(first * alignment, low)
