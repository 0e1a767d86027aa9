"""Pipeline schedules: every order is valid, keeps its memory, and mistakes are named."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core_attention.errors import ScheduleError
from core_attention.schedule import Action, Kind, Schedule, from_orders, read_csv, write_csv
from core_attention.schedule_orders import (
    SCHEDULES,
    interleaved,
    one_f_one_b,
    same_phase,
    zero_bubble,
)

SIZES = (st.integers(1, 6), st.integers(1, 9))


def parse(*rows: str) -> Schedule:
    return read_csv("mine", "\n".join(rows))


@given(st.sampled_from(sorted(SCHEDULES)), *SIZES)
def test_orders_are_valid_and_travel_as_csv(name: str, n_ranks: int, n_microbatches: int) -> None:
    if name == "interleaved":
        n_microbatches *= n_ranks
    schedule = SCHEDULES[name](n_ranks, n_microbatches)
    assert schedule.n_ranks == n_ranks
    assert schedule.n_microbatches == n_microbatches
    assert read_csv(name, write_csv(schedule)) == schedule


@given(*SIZES)
def test_1f1b_keeps_p_minus_s_microbatches(n_stages: int, n_microbatches: int) -> None:
    schedule = one_f_one_b(n_stages, n_microbatches)
    assert [schedule.in_flight(stage) for stage in range(n_stages)] == [
        min(n_stages - stage, n_microbatches) for stage in range(n_stages)
    ]
    assert len(schedule.slots) == 2 * (n_microbatches + n_stages - 1)


@given(*SIZES)
def test_same_phase_keeps_phases_apart_and_up_to_2p_minus_1_microbatches(
    n_stages: int, n_microbatches: int
) -> None:
    schedule = same_phase(n_stages, n_microbatches)
    for slot in schedule.slots:
        assert len({action.kind for action in slot if action is not None}) == 1
    assert len(schedule.slots) == 2 * (n_microbatches + n_stages - 1)
    assert [schedule.in_flight(stage) for stage in range(n_stages)] == [
        min(2 * (n_stages - 1 - stage) + 1, n_microbatches) for stage in range(n_stages)
    ]


@given(*SIZES)
def test_zero_bubble_keeps_the_memory_of_the_first_stage_of_1f1b(
    n_stages: int, n_microbatches: int
) -> None:
    schedule = zero_bubble(n_stages, n_microbatches)
    assert schedule.peak_in_flight <= one_f_one_b(n_stages, n_microbatches).peak_in_flight
    if n_microbatches >= n_stages:
        assert len(schedule.slots) == 3 * n_microbatches + n_stages - 1


@given(*SIZES, st.integers(1, 6))
def test_zero_bubble_keeps_to_what_may_be_deferred(
    n_stages: int, n_microbatches: int, most: int
) -> None:
    schedule = zero_bubble(n_stages, n_microbatches, most)
    free = zero_bubble(n_stages, n_microbatches)
    assert schedule.peak_in_flight <= free.peak_in_flight
    held = 0
    for rank in range(n_stages):
        deferred = 0
        for action in schedule.order(rank):
            deferred += action.kind is Kind.BACKWARD_INPUT
            deferred -= action.kind is Kind.BACKWARD_WEIGHT
            held = max(held, deferred)
    assert held <= most
    if most >= n_microbatches:
        assert schedule == free


def test_interleaved_is_megatrons_order() -> None:
    schedule = interleaved(2, 4)
    first, second = ([str(action) for action in schedule.order(rank)] for rank in range(2))
    # Both written by hand from arXiv 2104.04473, figure 4.
    assert " ".join(first) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert " ".join(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    assert schedule.rank_of_stage == (0, 1, 0, 1)


def test_a_file_of_orders_without_slots_is_given_slots() -> None:
    schedule = parse("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")
    assert [[str(a) if a else "" for a in slot] for slot in schedule.slots] == [
        ["0F0", ""],
        ["0F1", "1F0"],
        ["", "1B0"],
        ["0B0", "1F1"],
        ["", "1B1"],
        ["0B1", ""],
    ]


def test_a_cell_may_hold_actions_that_kernels_may_overlap() -> None:
    schedule = parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1", "1F0,1B0,(1F1;1B1)OVERLAP_F_B")
    assert [list(map(str, schedule.order(rank))) for rank in range(2)] == [
        ["0F0", "0F1", "0B0", "0B1"],
        ["1F0", "1B0", "1F1", "1B1"],
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [""],
        ["0F0,0X0"],
        ["0F0,(0F1;0X0)OVERLAP_F_B"],
        ["0F0,()OVERLAP_F_B"],
        ["0F0,0B0,0B0"],
        ["0F0"],
        ["0F0,0I0,0B0,0W0"],
        ["0F1,0B1"],
        ["0F0,0B0", "2F0,2B0"],
        ["0F0,,,0B0", ",0F1,0B1"],
        ["0B0,0F0"],
        ["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"],
        ["0F0,1F0,1B0,0B0", ",,,"],
        ["0F0,0B0", "x" * 131073],
        ["9" * 5000 + "F0"],
    ],
    ids=range(15),
)
def test_bad_files_are_refused(rows: list[str]) -> None:
    with pytest.raises(ScheduleError):
        parse(*rows)


def test_a_byte_order_mark_is_left_out() -> None:
    assert parse("\ufeff0F0,0B0") == parse("0F0,0B0")


def test_bad_slots_are_refused() -> None:
    forward, backward = Action(0, Kind.FORWARD, 0), Action(0, Kind.BACKWARD, 0)
    for slots in (((forward,), (backward, None)), ((backward,), (forward,)), ((None,),)):
        with pytest.raises(ScheduleError):
            Schedule("mine", slots)
    with pytest.raises(ScheduleError):
        from_orders("mine", [[backward, forward]])


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_bad_sizes_are_refused(name: str) -> None:
    # Interleaved takes whole rounds of microbatches.
    for sizes in ((0, 4), (2, 0), *([(3, 7)] if name == "interleaved" else [])):
        with pytest.raises(ScheduleError):
            SCHEDULES[name](*sizes)
