"""From a finished board to sorted tasks."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner.board import (
    BEGIN,
    CHUNKS,
    END,
    FREE,
    SEGMENT,
    SERVER,
    Board,
    Segments,
)
from control_plane.planner.fleet import build_fleet
from control_plane.planner.tasks import Cuts, collect_cuts, write_tasks
from tests.service.control_plane.planner.boards import empty_board, segments_of
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, uniform_profile

FLEET = build_fleet(in_place(3, profile=uniform_profile()), 3)


def tasks_of(board: Board, segments: Segments) -> list[tuple[int, ...]]:
    cuts = Cuts(*callable_from_python(collect_cuts)(board, segments, FLEET))
    columns = [np.full(cuts.n_tasks, -9) for _ in range(4)]
    write_tasks(cuts, segments, FLEET, *columns)
    return [tuple(row) for row in np.array(columns).T.tolist()]


def chunk(board: Board, segment: int, begin: int, end: int, server: int) -> None:
    at = board.used[CHUNKS]
    board.used[CHUNKS] += 1
    row = board.chunks[at]
    row[SEGMENT], row[BEGIN], row[END], row[SERVER] = segment, begin, end, server


def rest(board: Board, segment: int, begin: int, end: int) -> None:
    at = board.used[FREE]
    board.used[FREE] += 1
    board.free[at, SEGMENT], board.free[at, BEGIN], board.free[at, END] = segment, begin, end


@pytest.fixture
def board() -> Board:
    return empty_board(3, 3, [[], [], []])


@pytest.mark.parametrize("divided", [False, True])
def test_what_was_not_cut_runs_where_its_rank_is(board: Board, divided: bool) -> None:
    segments = segments_of([(0, 0, 40, 1), (1, 0, 30, 0), (2, 0, 20, 2)])._replace(divided=divided)
    assert tasks_of(board, segments) == [(0, 0, 40, 1), (1, 0, 30, 0), (2, 0, 20, 2)]


def test_pieces_lie_in_order_and_rests_stay_at_home(board: Board) -> None:
    segments = segments_of([(0, 0, 40, 1), (1, 0, 30, 0), (2, 0, 20, 2)])
    chunk(board, 1, 20, 30, 2)
    chunk(board, 1, 5, 10, 1)
    rest(board, 1, 10, 20)
    rest(board, 1, 0, 5)
    assert tasks_of(board, segments) == [
        (0, 0, 40, 1),
        (1, 0, 5, 0),
        (1, 5, 10, 1),
        (1, 10, 20, 0),
        (1, 20, 30, 2),
        (2, 0, 20, 2),
    ]


def test_neighbours_on_one_server_are_one_task_of_one_segment(board: Board) -> None:
    segments = segments_of([(0, 0, 40, 1), (0, 40, 60, 0)])
    chunk(board, 0, 20, 30, 2)
    chunk(board, 0, 30, 40, 2)
    chunk(board, 1, 40, 60, 2)
    rest(board, 0, 0, 20)
    assert tasks_of(board, segments) == [(0, 0, 20, 1), (0, 20, 40, 2), (0, 40, 60, 2)]


def test_segments_that_moved_whole_run_where_they_went(board: Board) -> None:
    segments = segments_of([(0, 0, 40, 1), (1, 0, 30, 0)])
    moved = board._replace(server=np.array([2, -1]))
    assert tasks_of(moved, segments) == [(0, 0, 40, 2), (1, 0, 30, 0)]
