"""Free parts, chunks, who holds which keys, and what limits leave."""

from __future__ import annotations

import pytest

from control_plane.planner.board import (
    BYTES,
    COST,
    Board,
    add_chunk,
    add_free,
    affordable,
    hold,
    remove_free,
    resident_end,
)
from control_plane.planner.chunk import cut_rules
from control_plane.planner.fleet import build_fleet
from tests.service.control_plane.planner.boards import empty_board, segments_of
from tests.service.control_plane.planner.compiled_calls import callable_from_python
from tests.support.planning_cases import in_place, pool, uniform_profile

N_RANKS = 2
PROFILE = uniform_profile(1.0)
FLEET = build_fleet([*in_place(N_RANKS, profile=PROFILE), *pool(1, profile=PROFILE)], N_RANKS)
POOL = 2
# Document 0 lies on both ranks, document 1 whole on rank 1.
SEGMENTS = segments_of([(0, 0, 60, 0), (0, 60, 100, 1), (1, 0, 50, 1)])
RULES = cut_rules(0, 8, 3, 4, 1)

add = callable_from_python(add_free)
remove = callable_from_python(remove_free)
resident = callable_from_python(resident_end)
note = callable_from_python(hold)
can_afford = callable_from_python(affordable)
export = callable_from_python(add_chunk)


@pytest.fixture
def board() -> Board:
    return empty_board(3, N_RANKS, [[(0, 60)], [(0, 100)]])


def test_keys_are_there_that_a_rank_has_and_that_a_server_was_given(board: Board) -> None:
    assert resident(board, FLEET, 0, 0) == 60
    assert resident(board, FLEET, 1, 0) == 0
    assert resident(board, FLEET, 0, POOL) == 0
    note(board, 0, POOL, 30)
    note(board, 1, POOL, 7)
    note(board, 0, POOL, 20)
    assert resident(board, FLEET, 0, POOL) == 30
    note(board, 0, POOL, 90)
    assert resident(board, FLEET, 0, POOL) == 90
    assert resident(board, FLEET, 1, POOL) == 7
    note(board, 0, 0, 50)
    assert resident(board, FLEET, 0, 0) == 60, "what its rank has is more"


def test_a_chunk_costs_its_rows_and_the_keys_that_are_not_there(board: Board) -> None:
    export(board, SEGMENTS, FLEET, RULES, 1, 80, 100, POOL, 2.0)
    first = RULES.q_bytes * 20 + RULES.kv_bytes * 100
    assert board.spent.tolist() == [first, 2 * first]
    assert board.load[POOL] == pytest.approx((100 * 101 - 80 * 81) / 2)
    export(board, SEGMENTS, FLEET, RULES, 1, 60, 80, POOL, 1.0)
    assert board.spent[BYTES] == first + RULES.q_bytes * 20, "keys up to 100 are there"
    assert board.spent[COST] == 2 * first + RULES.q_bytes * 20


def test_keys_of_a_document_that_moves_whole_are_kept_by_nobody(board: Board) -> None:
    export(board, SEGMENTS, FLEET, RULES, 2, 0, 50, POOL, 1.0)
    assert resident(board, FLEET, 1, POOL) == 0


def test_a_chunk_takes_room_where_servers_have_limits(board: Board) -> None:
    """Queries [80, 100) need themselves and the keys up to 100."""
    limited = FLEET._replace(is_limited=True)
    board.rows[POOL] = 120
    assert can_afford(board, limited, 80, 100, POOL, 0)
    export(board, SEGMENTS, limited, RULES, 1, 80, 100, POOL, 1.0)
    assert board.rows.tolist() == [10**6, 10**6, 0]
    assert not can_afford(board, limited, 79, 80, POOL, 80)
    assert can_afford(board, FLEET, 79, 80, POOL, 80)
