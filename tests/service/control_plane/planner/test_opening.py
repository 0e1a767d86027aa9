"""The board before anything has moved."""

from __future__ import annotations

import numpy as np

from control_plane.planner.board import BEGIN, END, NEXT, SEGMENT, Limits
from control_plane.planner.fleet import build_fleet
from control_plane.planner.opening import (
    Opening,
    limits_after_home_work,
    open_board,
    prepare_opening,
)
from control_plane.planner.target_load import Work
from tests.service.control_plane.planner.boards import empty_board, limits, segments_of
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, uniform_profile

N_RANKS = 3
FLEET = build_fleet(in_place(N_RANKS, profile=uniform_profile()), N_RANKS)
# Document 1 lies on ranks 0 and 1, the others whole on a rank.
SEGMENTS = segments_of([(0, 0, 40, 0), (1, 0, 25, 0), (1, 25, 90, 1), (2, 0, 70, 0), (3, 0, 9, 2)])


def work_of(
    load: list[float], *, base: tuple[float, ...] = (0.0,) * N_RANKS, homeless: tuple[int, ...] = ()
) -> Work:
    is_homeless = np.zeros(N_RANKS, dtype=np.bool_)
    is_homeless[list(homeless)] = True
    every = np.ones(N_RANKS, dtype=np.bool_)
    moved = np.flatnonzero(is_homeless[SEGMENTS.rank])
    ones = np.ones(N_RANKS)
    arrays = (ones, np.array(base), np.array(load), ones, is_homeless, moved)
    return Work(every, *arrays, pairs=1, homeless_pairs=0, target_load=1)


def opening_of(work: Work, *, cap: float = 10.0, everyone: bool = False) -> Opening:
    prepare = callable_from_python(prepare_opening)
    return Opening(*prepare(SEGMENTS, N_RANKS, FLEET, work, cap, everyone))


def free_of(opening: Opening, rank: int) -> list[tuple[int, int, int]]:
    found, at = [], int(opening.first_free[rank])
    while at >= 0:
        part = opening.free[at]
        found.append((int(part[SEGMENT]), int(part[BEGIN]), int(part[END])))
        at = int(part[NEXT])
    return found


def test_who_may_come_to_give_offers_its_segments_latest_end_first() -> None:
    opening = opening_of(work_of([10.1, 10.0, 0.0]))
    assert free_of(opening, 0) == [(3, 0, 70), (0, 0, 40), (1, 0, 25)]
    assert free_of(opening, 1) == free_of(opening, 2) == []


def test_what_a_server_computes_besides_makes_it_give_earlier() -> None:
    opening = opening_of(work_of([8.0, 8.0, 0.0], base=(2.1, 2.0, 11.0)))
    assert [bool(free_of(opening, rank)) for rank in range(N_RANKS)] == [True, False, True]


def test_where_memory_is_limited_everyone_with_a_server_may_have_to_give() -> None:
    opening = opening_of(work_of([10.1, 10.0, 0.0], homeless=(2,)), everyone=True)
    assert free_of(opening, 1) == [(2, 25, 90)]
    assert free_of(opening, 2) == []


def test_ranks_have_the_keys_of_documents_that_they_share() -> None:
    opening = opening_of(work_of([0.0, 0.0, 0.0]))
    first = opening.own_first
    own = [opening.own[first[r] : first[r + 1]].tolist() for r in range(N_RANKS)]
    assert own == [[[1, 25]], [[1, 90]], []]


def test_a_board_is_a_copy_with_room_for_chunks() -> None:
    work = work_of([10.1, 10.0, 0.0])
    opening = opening_of(work)
    board = callable_from_python(open_board)(opening, work, len(SEGMENTS.begin))
    assert board.load.tolist() == work.load.tolist()
    board.load[:] = board.first_free[:] = board.free[:] = -7
    assert work.load.tolist() == [10.1, 10.0, 0.0]
    assert free_of(opening, 0)[0] == (3, 0, 70)
    assert len(board.chunks) >= 8 * N_RANKS
    assert len(board.server) == 0
    homeless = work_of([0.0, 0.0, 0.0], homeless=(2,))
    board = callable_from_python(open_board)(opening, homeless, len(SEGMENTS.begin))
    assert board.server.tolist() == [-1] * len(SEGMENTS.begin)


def used(after: Limits, before: Limits) -> tuple[list[float], list[float], list[float]]:
    return (
        (before.rows - after.rows).tolist(),
        (before.sent_bytes - after.sent_bytes)[:N_RANKS].tolist(),
        (before.received_bytes - after.received_bytes)[:N_RANKS].tolist(),
    )


def test_home_work_holds_its_rows_and_fetches_the_keys_of_others() -> None:
    board = empty_board(N_RANKS, N_RANKS, [[(1, 25)], [(1, 90)], []])
    before = limits(N_RANKS, N_RANKS)
    nobody = np.zeros(N_RANKS, dtype=np.bool_)
    after = callable_from_python(limits_after_home_work)(SEGMENTS, FLEET, board, before, nobody)
    rows, sent, received = used(Limits(*after), before)
    # Queries, the keys of whole documents, and of shared ones all up to the last segment.
    assert rows == [40 + 40 + 25 + 25 + 70 + 70, 65 + 90, 9 + 9]
    # Rank 1 fetches keys [0, 25) of document 1 from rank 0, and gives their gradients back.
    assert sent == [25 * 5.0, 25 * 7.0, 0.0]
    assert received == [25 * 7.0, 25 * 5.0, 0.0]


def test_homeless_ranks_have_no_home_work() -> None:
    board = empty_board(N_RANKS, N_RANKS, [[(1, 25)], [], []])
    before = limits(N_RANKS, N_RANKS)
    homeless = np.array([False, True, False])
    after = callable_from_python(limits_after_home_work)(SEGMENTS, FLEET, board, before, homeless)
    rows, sent, _ = used(Limits(*after), before)
    assert rows == [40 + 40 + 25 + 25 + 70 + 70, 0, 9 + 9]
    assert sent == [0.0, 0.0, 0.0]


def test_without_limits_there_is_nothing_to_count() -> None:
    board = empty_board(N_RANKS, N_RANKS, [[(1, 25)], [(1, 90)], []])
    none = limits(N_RANKS, N_RANKS, active=False)
    nobody = np.zeros(N_RANKS, dtype=np.bool_)
    after = callable_from_python(limits_after_home_work)(SEGMENTS, FLEET, board, none, nobody)
    assert used(Limits(*after), none)[0] == [0, 0, 0]
