"""Decisions of a server that the model tests do not reach: memory, losses, what is reported."""

from __future__ import annotations

import pytest

from attention_node.machine import instructions
from attention_node.machine.back_pressure import CALM_SECONDS
from attention_node.machine.outline import StepOutline, TickOutline
from attention_node.machine.server import LOST_RANK_SECONDS, RankRefusal, ServerMachine
from core_attention.tick import Tick, ticks_of_lane

TICK_BYTES = 2
Machine = ServerMachine[str, str]


def outline_of(step: int, epoch: int = 0) -> StepOutline:
    """One lane of two ticks, in which ranks 0 and 1 take part; one part needs both."""
    of_tick = TickOutline(
        needs=(frozenset({0, 1}),),
        before_reply={0: frozenset({0}), 1: frozenset({0})},
        owed=frozenset({0, 1}),
        message_bytes={0: TICK_BYTES // 2, 1: TICK_BYTES // 2},
    )
    ticks = ticks_of_lane(step, 0, 2, backward=False)
    return StepOutline(step, epoch, 2, {0: dict.fromkeys(ticks, of_tick)})


def first_tick(step: int = 0) -> Tick:
    return next(iter(outline_of(step).lanes[0]))


def machine_with(*ranks: str, limit_bytes: int | None = None, head_groups: int = 1) -> Machine:
    """A server with a job to which these ranks have connected."""
    machine: Machine = ServerMachine("server", limit_bytes)
    machine.open_job("job", 1, head_groups=head_groups)
    for number, rank in enumerate(ranks):
        machine.connect("job", rank, number, 0, 0)
    return machine


def add(machine: Machine, step: int, epoch: int = 0) -> list[object]:
    handle = f"step {step}, epoch {epoch}"
    assert machine.wants_plan("job", step, epoch)
    return [*machine.step_planned("job", handle, outline_of(step, epoch))]


def test_memory_is_set_aside_before_receives_are_posted() -> None:
    machine = machine_with("a", "b")
    assert add(machine, 0) == [
        instructions.ReserveMemory("step 0, epoch 0"),
        instructions.PostReceive("a", "step 0, epoch 0", first_tick()),
        instructions.PostReceive("b", "step 0, epoch 0", first_tick()),
    ]


def test_receives_of_a_call_are_posted_together_behind_the_replies_of_the_one_before() -> None:
    machine = machine_with("a", head_groups=2)
    handle, outline = "step 0, epoch 0", outline_of(0)
    assert machine.wants_plan("job", 0, 0)
    lane = dict.fromkeys(ticks_of_lane(0, 0, 4, backward=False), outline.lanes[0][first_tick()])
    ticks = list(lane)
    due = machine.step_planned("job", handle, StepOutline(0, 0, 4, {0: lane}))
    assert due[1:] == [instructions.PostReceive("a", handle, tick) for tick in ticks[:2]]
    assert machine.answered("a", ticks[1]) == []
    assert machine.answered("a", ticks[0]) == [
        instructions.PostReceive("a", handle, tick) for tick in ticks[2:]
    ]


def test_a_receive_without_room_is_posted_when_memory_comes_back() -> None:
    machine = machine_with("a", "b", limit_bytes=TICK_BYTES)
    add(machine, 0)
    machine.now = 1.0
    (overloaded,) = machine.no_room("a", first_tick())
    assert isinstance(overloaded, instructions.LogLine)
    assert overloaded.level == "warning"
    machine.now = 2.0
    assert machine.no_room("b", first_tick()) == []
    assert machine.memory_freed() == [instructions.RetrySoon()]
    assert machine.memory_freed() == [], "one is due"
    machine.now = 4.0
    again = machine.retry()
    posted = [each.peer for each in again if isinstance(each, instructions.PostReceive)]
    waits = [each.seconds for each in again if isinstance(each, instructions.ReportWait)]
    assert (posted, waits) == (["a", "b"], [3.0, 2.0])
    machine.now = 5.0
    machine.no_room("a", first_tick())
    machine.disconnect("a", was_reset=False)
    machine.now = 6.0 + CALM_SECONDS
    machine.retry()
    machine.now = 7.0 + 2 * CALM_SECONDS
    (calm,) = machine.retry()
    assert isinstance(calm, instructions.LogLine)
    assert calm.level == "info"


def test_a_step_that_never_fits_closes_its_ranks_and_refuses_them() -> None:
    machine = machine_with("a", limit_bytes=TICK_BYTES - 1)
    note, closed = add(machine, 0)
    assert isinstance(note, instructions.LogLine)
    assert note.level == "error"
    assert isinstance(closed, instructions.CloseConnection)
    assert "cannot be served by server" in closed.why
    refused = machine.connect("job", "b", 1, 0, 0)
    assert isinstance(refused, RankRefusal)
    assert refused.cause == "memory"
    assert machine.idle


def test_a_late_end_of_a_tick_takes_nothing_from_the_plan_that_replaced_its_own() -> None:
    machine = machine_with("a", limit_bytes=TICK_BYTES)
    add(machine, 0)
    machine.rows_arrived("job", "a", "step 0, epoch 0", first_tick())
    dropped = add(machine, 0, epoch=1)
    assert [type(each) for each in dropped].count(instructions.GiveUpTick) == 1
    machine.connect("job", "again", 0, 0, 1)
    machine.tick_over("job", "step 0, epoch 0", first_tick(), "given up")
    assert machine.is_serving(0)
    taken = machine.rows_arrived("job", "again", "step 0, epoch 1", first_tick())
    assert isinstance(taken, tuple)


def test_a_failed_tick_fails_its_step() -> None:
    machine = machine_with("a", "b")
    add(machine, 0)
    machine.rows_arrived("job", "a", "step 0, epoch 0", first_tick())
    machine.tick_over("job", "step 0, epoch 0", first_tick(), "no memory")
    assert machine.idle
    refused = machine.rows_arrived("job", "b", "step 0, epoch 0", first_tick())
    assert isinstance(refused, str)
    assert refused.endswith("failed: no memory")


def test_a_tick_is_given_up_if_it_shares_documents_with_a_rank_that_skips_it() -> None:
    machine = machine_with("a", "b")
    add(machine, 0)
    opened = machine.rows_arrived("job", "b", "step 0, epoch 0", first_tick())
    assert not isinstance(opened, str)
    (due,) = machine.lane_skipped("job", "a", 0, "step 0, epoch 0", first_tick())
    assert isinstance(due, instructions.GiveUpTick)
    assert due.tick is opened[1]


@pytest.mark.parametrize("was_reset", [True, False])
def test_only_a_reset_of_the_last_connection_loses_a_rank(was_reset: bool) -> None:
    machine = machine_with("a", "b")
    machine.connect("job", "a again", 0, 0, 0)
    first = machine.disconnect("a", was_reset=was_reset)
    assert first == [instructions.ReportGone("a", is_lost=False)]
    machine.now = 2.0
    last = machine.disconnect("a again", was_reset=was_reset)
    assert last == [instructions.ReportGone("a again", is_lost=was_reset)]
    assert machine.lost_ranks == ([("job", 0)] if was_reset else [])
    machine.now = 2.0 + LOST_RANK_SECONDS
    assert machine.lost_ranks == []
    machine.now = 3.0
    machine.close_job("job", "over")
    assert machine.lost_ranks == []
    assert machine.disconnect("a again", was_reset=was_reset) == []


def test_a_server_with_a_reply_on_its_way_is_not_idle() -> None:
    machine = machine_with("a")
    machine.reply_begun()
    assert not machine.idle
    assert machine.is_serving(0)
    machine.reply_ended()
    assert machine.idle


def test_a_plan_of_an_unknown_job_is_an_error() -> None:
    with pytest.raises(KeyError):
        machine_with().wants_plan("another", 0, 0)
