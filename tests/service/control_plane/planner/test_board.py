"""Free parts, chunks, who holds which keys, and what limits leave."""

from __future__ import annotations

import pytest

from control_plane.planner.board import (
    BYTES,
    COST,
    Board,
    Limits,
    add_chunk,
    add_free,
    affordable,
    charge,
    hold,
    process_of,
    remove_free,
    resident_end,
)
from control_plane.planner.chunk import cut_rules
from control_plane.planner.fleet import build_fleet
from tests.service.control_plane.planner.boards import (
    empty_board,
    limits,
    no_limits,
    segments_of,
)
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
take_from_limits = callable_from_python(charge)
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
    unlimited = no_limits(3, N_RANKS)
    export(board, SEGMENTS, FLEET, RULES, unlimited, 1, 80, 100, POOL, 2.0)
    first = RULES.q_bytes * 20 + RULES.kv_bytes * 100
    assert board.spent.tolist() == [first, 2 * first]
    assert board.load[POOL] == pytest.approx((100 * 101 - 80 * 81) / 2)
    export(board, SEGMENTS, FLEET, RULES, unlimited, 1, 60, 80, POOL, 1.0)
    assert board.spent[BYTES] == first + RULES.q_bytes * 20, "keys up to 100 are there"
    assert board.spent[COST] == 2 * first + RULES.q_bytes * 20


def test_keys_of_a_document_that_moves_whole_are_kept_by_nobody(board: Board) -> None:
    export(board, SEGMENTS, FLEET, RULES, no_limits(3, N_RANKS), 2, 0, 50, POOL, 1.0)
    assert resident(board, FLEET, 1, POOL) == 0


def test_processes_of_in_place_servers_are_their_ranks() -> None:
    process = callable_from_python(process_of)
    assert [process(FLEET, server) for server in range(3)] == [0, 1, N_RANKS + POOL]


def left(limits: Limits, before: Limits) -> dict[str, list[float]]:
    return {
        "rows": (before.rows - limits.rows).tolist(),
        "sent": (before.sent_bytes - limits.sent_bytes).tolist(),
        "received": (before.received_bytes - limits.received_bytes).tolist(),
    }


def test_every_process_that_a_chunk_concerns_is_charged() -> None:
    """Queries [80, 100) of document 0, at home on rank 1, go to the pool server: it gets keys
    [0, 60) from rank 0 and the rest from rank 1."""
    before, after = limits(3, N_RANKS), limits(3, N_RANKS)
    take_from_limits(SEGMENTS, FLEET, after, 1, 80, 100, POOL, 0)
    assert left(after, before) == {
        "rows": [0, 0, 120],
        "sent": [60 * 5.0, 20 * 2.0 + 40 * 5.0, 0, 0, 20 * 3.0 + 100 * 7.0],
        "received": [60 * 7.0, 20 * 3.0 + 40 * 7.0, 0, 0, 20 * 2.0 + 100 * 5.0],
    }


CHUNK = (1, 80, 100, POOL, 0)
NEEDS = {
    "rows": ("rows", POOL, 120),
    "what the server gets": ("received_bytes", 4, 540.0),
    "what the server sends": ("sent_bytes", 4, 760.0),
    "what the rank with the queries sends": ("sent_bytes", 1, 240.0),
    "what the rank with the queries gets": ("received_bytes", 1, 340.0),
    "what the rank with the other keys sends": ("sent_bytes", 0, 300.0),
    "what the rank with the other keys gets": ("received_bytes", 0, 420.0),
}


@pytest.mark.parametrize("need", NEEDS)
def test_a_chunk_needs_room_at_every_process(need: str) -> None:
    column, at, amount = NEEDS[need]
    enough = limits(3, N_RANKS)
    getattr(enough, column)[at] = amount
    assert can_afford(SEGMENTS, FLEET, enough, *CHUNK)
    getattr(enough, column)[at] = amount - 1
    assert not can_afford(SEGMENTS, FLEET, enough, *CHUNK)
