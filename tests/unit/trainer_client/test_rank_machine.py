"""A rank's decisions, one at a time. How they work together, :mod:`tests.model` explores."""

from __future__ import annotations

from typing import Any

import pytest

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.machine import instructions
from trainer_client.machine.outlines import LaneOutline, PlanOutline
from trainer_client.machine.rank import RankMachine
from trainer_client.machine.step import StepMachine

N_LAYERS = 2
PATIENCE_SECONDS = 30.0
SHARED = LaneOutline(has_rows=True, is_shared=True)
ALONE = LaneOutline(has_rows=True, is_shared=False)
EMPTY = LaneOutline(has_rows=False, is_shared=False)

Done = list[instructions.Instruction[str, str]]


def forward(layer: int, step: int = 0) -> Tick:
    return Tick(step, layer, 0, Phase.FORWARD)


def backward(layer: int, step: int = 0) -> Tick:
    return Tick(step, layer, 0, Phase.BACKWARD)


class Rank:
    """A machine with one nano-batch, and a training loop that follows it."""

    def __init__(self, lane: LaneOutline = SHARED, *, kept: int | None = None) -> None:
        self.lane = lane
        self.machine: RankMachine[str, str, str] = RankMachine(
            N_LAYERS, 1, recovery_timeout_seconds=PATIENCE_SECONDS, kept_forward_ticks=kept
        )

    def running(self, step: int = 0) -> StepMachine[str, str]:
        running = self.machine.running(step)
        assert running is not None
        return running

    def hand_in(self, *steps: int) -> None:
        for step in steps:
            self.machine.hand_in(step, f"manifest {step}")

    def begin(self, step: int, *, forward_only: bool = False) -> Done:
        return self.machine.begin_step(step, (self.lane,), forward_only=forward_only, now=0.0)

    def plan(self, step: int, epoch: int, first_tick: int = 0, now: float = 0.0) -> Done:
        """A plan comes, and the rank's own server has it."""
        outline = plan_of(step, epoch, first_tick)
        came = self.machine.plan_came(outline, now)
        return [*came[:-1], *self.machine.own_server_planned(outline)]

    def connected(self, epoch: int) -> Done:
        return self.machine.connected(0, epoch, 0.0)

    def replay_sent(self, epoch: int, now: float = 0.0) -> Done:
        return self.machine.replay_sent(0, epoch, now)

    def run_under(self, step: int, epoch: int, first_tick: int = 0) -> None:
        """The step runs under a plan."""
        self.plan(step, epoch, first_tick)
        done = self.machine.connected(step, epoch, 0.0)
        while any(isinstance(each, instructions.ReportReplay) for each in done):
            done = self.machine.replay_sent(step, epoch, 0.0)

    def call(self, tick: Tick) -> instructions.SendTick | None:
        """The training loop comes to a tick."""
        running = self.running(tick.step)
        if tick.phase is Phase.FORWARD:
            running.lanes[0].calls.forward(needs_backward=True)
        else:
            running.lanes[0].calls.backward(tick.layer)
        return running.begin(tick)

    def send(self, tick: Tick, epoch: int) -> None:
        """A tick begins and waits for its replies."""
        assert self.call(tick) == instructions.SendTick(tick, epoch)
        assert self.running(tick.step).under_way(tick, epoch)

    def take_in(self, tick: Tick, epoch: int) -> Done:
        """The replies to a tick come, and nothing is wrong with them."""
        assert self.running(tick.step).replies_here(tick, epoch)
        return self.running(tick.step).examined(tick, epoch)

    def complete(self, tick: Tick, epoch: int) -> Done:
        self.send(tick, epoch)
        return self.take_in(tick, epoch)

    def run_all(self, step: int, epoch: int) -> None:
        for tick in [*map(forward, range(N_LAYERS)), *map(backward, reversed(range(N_LAYERS)))]:
            self.complete(Tick(step, tick.layer, 0, tick.phase), epoch)

    def recover(self, epoch: int, now: float = 0.0) -> Done:
        return self.machine.recover(epoch, ("server-1",), "it was lost", now)


def plan_of(step: int, epoch: int, first_tick: int = 0) -> PlanOutline[str]:
    return PlanOutline(step, epoch, f"plan {step} of epoch {epoch}", (first_tick,))


def running_rank(lane: LaneOutline = SHARED, *, kept: int | None = None) -> Rank:
    """Step 0 runs under the plan of epoch 1."""
    rank = Rank(lane, kept=kept)
    rank.hand_in(0)
    rank.begin(0)
    rank.run_under(0, 1)
    return rank


def of_type(done: Done, kind: type) -> list[Any]:
    return [each for each in done if isinstance(each, kind)]


def answer(done: Done) -> dict[int, tuple[tuple[int, ...], bool]]:
    (report,) = of_type(done, instructions.ReportProgress)
    return {each.step: (each.complete_ticks, each.done) for each in report.steps}


# Steps and manifests.


def test_a_refused_step_is_refused_once_and_may_be_handed_in_again() -> None:
    rank = Rank()
    rank.hand_in(3)
    rank.machine.refuse(3, "no server")
    rank.machine.refuse(8, "another rank's step")
    assert rank.machine.is_known(3)
    assert not rank.machine.is_known(8)
    assert rank.machine.manifests == []
    assert rank.machine.take_refusal(3) == "no server"
    assert rank.machine.take_refusal(3) == ""
    assert not rank.machine.is_known(3)
    rank.hand_in(3)
    assert rank.machine.is_known(3)
    assert rank.machine.manifests == ["manifest 3"]


def test_a_hand_in_gets_its_number_and_those_before_it_are_void() -> None:
    rank = Rank()
    for sequence in (1, 2, 3):
        rank.machine.join(sequence, f"hand-in {sequence}")
    assert rank.machine.manifests == ["hand-in 3"]
    rank.machine.begins(3, "begun")
    assert rank.machine.manifests == ["begun"]
    rank.machine.numbered(2, 5, "manifest 5")
    assert rank.machine.number_of(1) is None
    assert rank.machine.number_of(2) == 5
    assert rank.machine.joining(1) is None
    assert rank.machine.manifests == ["manifest 5", "begun"]
    assert rank.machine.void_before(3) == [5]
    assert rank.machine.first_unknown == 6
    rank.machine.refuse_hand_in(3, "too many")
    assert rank.machine.take_refused_hand_in(3) == "too many"
    assert rank.machine.manifests == ["manifest 5"]


def test_a_hand_in_that_ran_at_home_is_left_out_under_another_number() -> None:
    rank = Rank(ALONE)
    rank.machine.join(1, "hand-in 1")
    rank.machine.numbered(1, 4, "manifest 4")
    rank.begin(4)
    rank.machine.go_home(4, 0.0)
    assert rank.machine.manifests == []
    rank.machine.numbered_late(1, 3)
    rank.plan(3, 1)
    assert rank.machine.number_of(1) == 4
    assert rank.machine.void_before(2) == [3]
    rank.begin(3)
    assert rank.machine.void_before(2) == []
    assert rank.machine.next_step == 4
    assert rank.machine.first_unknown == 5


def test_finished_steps_are_forgotten_unless_their_block_still_runs() -> None:
    rank = running_rank()
    rank.hand_in(1, 2)
    rank.machine.all_finished(1)
    assert rank.machine.manifests == ["manifest 0", "manifest 2"]
    assert rank.machine.running(0) is not None
    assert not rank.machine.is_known(1)
    assert rank.machine.next_step == 2
    assert rank.machine.is_finished(1)
    assert not rank.machine.is_finished(2)
    rank.run_all(0, 1)
    assert of_type(rank.machine.end_step(0, ""), instructions.ForgetInputs)
    assert rank.machine.running(0) is None


def test_steps_that_are_left_out_make_servers_go_on() -> None:
    rank = Rank()
    rank.hand_in(0, 1, 2)
    closed, abandoned = rank.begin(2)
    assert closed == instructions.CloseConnections("steps [0, 1] left out")
    assert abandoned == instructions.AbandonOwnServer(2)
    assert answer(rank.recover(1)) == {0: ((0,), True), 1: ((0,), True), 2: ((0,), False)}


# Plans.


def test_a_plan_of_a_higher_epoch_replaces_one_and_nothing_else_does() -> None:
    rank = Rank()
    rank.hand_in(3)
    assert rank.plan(3, 7) == [
        instructions.CloseConnections("a plan of epoch 7"),
        instructions.DeriveAhead("plan 3 of epoch 7"),
    ]
    assert rank.machine.plan_came(plan_of(3, 7), 0.0) == []
    rank.plan(3, 8)
    assert rank.machine.plan_came(plan_of(3, 7), 0.0) == []
    assert rank.machine.plan_came(plan_of(4, 7), 0.0) == [], "it is void before it has come"
    assert rank.machine.epoch == 8
    outline = rank.machine.outline_of(3)
    assert outline is not None
    assert outline.epoch == 8


def test_servers_that_cannot_be_reached_are_reported_once() -> None:
    rank = Rank()
    rank.hand_in(0)
    rank.begin(0)
    rank.plan(0, 1)
    unreachable = 0, 1, "connect", {"server-1": "refused"}
    detail = "step 0: cannot be reached: refused"
    lost = instructions.ReportLost("server-1", 1, "connect", detail)
    assert rank.machine.unreachable(*unreachable) == [lost]
    rank.recover(2)
    assert rank.machine.unreachable(*unreachable) == []


# Ticks.


def test_ticks_wait_for_a_plan_and_are_sent_when_it_comes() -> None:
    rank = Rank()
    rank.hand_in(0)
    rank.begin(0)
    assert rank.call(forward(0)) is None
    rank.plan(0, 1)
    sent = instructions.SendTick(forward(0), 1)
    assert rank.connected(1) == [sent, instructions.ReportReplay(0, 1)]
    assert rank.call(forward(1)) is None, "its turn comes behind what is replayed"
    assert rank.replay_sent(1) == [
        instructions.SendTick(forward(1), 1),
        instructions.ReportReplay(0, 1),
    ]
    (count,) = rank.replay_sent(1, now=2.5)
    assert count == instructions.CountRecovery(0, 1, 2.5, (forward(0), forward(1)))


def test_replies_of_an_epoch_that_is_over_are_let_go() -> None:
    rank = running_rank()
    rank.send(forward(0), 1)
    rank.call(forward(1))
    assert rank.running().replies_here(forward(0), 1)
    left = rank.recover(2)
    assert of_type(left, instructions.LetGo) == [], "those who examine them let them go"
    assert rank.running().examined(forward(0), 1) == [instructions.LetGo(forward(0), 1)]
    assert not rank.running().under_way(forward(1), 1)
    assert answer(rank.recover(2)) == {0: ((0,), False)}


def test_a_lost_server_is_reported_once_and_leaves_the_step_without_a_plan() -> None:
    rank = running_rank()
    rank.send(forward(0), 1)
    rank.send(forward(1), 1)
    lost = forward(1), 1, "server-1", "reset", "closed", 0.0
    detail = f"{forward(1)}: closed"
    assert rank.running().server_failed(*lost) == [
        instructions.LetGo(forward(0), 1),
        instructions.LetGo(forward(1), 1),
        instructions.ReportLost("server-1", 1, "reset", detail),
    ]
    assert rank.running().server_failed(*lost) == []
    assert rank.call(backward(1)) is None


@pytest.mark.parametrize("kept", [0, 1])
def test_only_the_latest_forward_inputs_are_kept_if_so_asked(kept: int) -> None:
    rank = running_rank(kept=kept)
    for layer in range(N_LAYERS):
        forgotten = of_type(rank.complete(forward(layer), 1), instructions.ForgetInputs)
        assert forgotten == [
            instructions.ForgetInputs(forward(each))
            for each in range(layer - kept, layer - kept + 1)
            if each >= 0
        ]


@pytest.mark.parametrize("kept", [None, 1], ids=["changed", "gone"])
def test_a_rank_that_has_gone_on_gives_up_a_step_that_it_cannot_send_again(
    kept: int | None,
) -> None:
    """Or those who need its rows would wait for them."""
    rank = Rank(kept=kept)
    rank.hand_in(0)
    rank.begin(0, forward_only=True)
    rank.run_under(0, 1)
    for layer in range(N_LAYERS):
        rank.complete(forward(layer), 1)
    assert rank.machine.end_step(0, "") == []
    rank.recover(2)
    rank.plan(0, 2)
    done = rank.connected(2)
    if kept is None:
        assert of_type(done, instructions.ReportGivenUp) == []
        done = rank.machine.replay_broke(0, "k changed")
    running = rank.running()
    reports = of_type(done, instructions.ReportGivenUp)
    assert reports == [instructions.ReportGivenUp(0, running.failure)]
    assert rank.replay_sent(2) == []
    assert not rank.machine.may_be_asked(0)
    assert answer(rank.recover(3)) == {0: ((0,), True)}


# Recoveries.


def test_a_recovery_voids_plans_before_it_answers() -> None:
    rank = running_rank()
    rank.complete(forward(0), 1)
    rank.send(forward(1), 1)
    let_go, closed, recovered, report = rank.recover(4)
    assert let_go == instructions.LetGo(forward(1), 1)
    assert closed == instructions.CloseConnections("recovery with epoch 4: it was lost")
    without = "recovery with epoch 4: it was lost; without server-1"
    assert recovered == instructions.RecoverOwnServer(4, without)
    progress = instructions.Progress(0, (1,), done=False)
    assert report == instructions.ReportProgress(4, (progress,))
    assert rank.recover(4) == [report], "asked again"
    assert rank.recover(3) == []
    assert rank.machine.plan_came(plan_of(0, 3), 0.0) == []
    assert rank.machine.is_over(3)
    assert not rank.machine.is_over(4)


def test_nothing_complete_is_replayed_that_nobody_needs() -> None:
    rank = running_rank()
    rank.complete(forward(0), 1)
    rank.recover(2)
    rank.plan(0, 2, first_tick=1)
    done = rank.connected(2)
    assert done == []
    assert rank.call(forward(1)) == instructions.SendTick(forward(1), 2)


def test_a_step_that_did_not_end_well_is_given_up_and_never_replayed() -> None:
    rank = running_rank()
    rank.send(forward(0), 1)
    assert rank.machine.end_step(0, "the model raised") == [
        instructions.LetGo(forward(0), 1),
        instructions.ForgetInputs(forward(0)),
        instructions.CloseConnections("step 0 was not run to its end"),
        instructions.AbandonOwnServer(1),
        instructions.ReportGivenUp(0, "the model raised"),
    ]
    assert of_type(rank.plan(0, 2), instructions.Connect) == []
    assert not rank.running().replies_here(forward(0), 1)


def test_a_step_that_stays_without_a_plan_fails_with_the_reason() -> None:
    rank = running_rank()
    rank.recover(2, now=10.0)
    running = rank.running()
    running.still_waiting(10.0 + PATIENCE_SECONDS, can_be_planned=True)
    assert running.failure == ""
    running.still_waiting(11.0 + PATIENCE_SECONDS, can_be_planned=False)
    running.still_waiting(11.0 + 2 * PATIENCE_SECONDS, can_be_planned=True)
    assert running.failure == "", "nobody could plan"
    running.still_waiting(12.0 + 2 * PATIENCE_SECONDS, can_be_planned=True)
    assert "without a plan for 30 s after: recovery with epoch 2" in running.failure


def test_a_rank_without_rows_is_complete_from_the_beginning() -> None:
    rank = running_rank(EMPTY)
    assert answer(rank.recover(2)) == {0: ((2 * N_LAYERS,), False)}
    assert rank.machine.end_step(0, "") == []
    assert not rank.machine.may_be_asked(0)


def test_a_rank_answers_the_recovery_whose_plan_has_come_before_it() -> None:
    rank = Rank()
    rank.hand_in(3)
    rank.plan(3, 7)
    assert answer(rank.recover(7)) == {3: ((0,), False)}
    outline = rank.machine.outline_of(3)
    assert outline is not None
    assert outline.epoch == 7


def test_steps_to_come_are_not_done_and_refused_ones_are_not_told() -> None:
    rank = running_rank()
    rank.run_all(0, 1)
    rank.machine.end_step(0, "")
    rank.machine.all_finished(0)
    rank.hand_in(1, 2)
    rank.machine.refuse(2, "no server")
    assert answer(rank.recover(2)) == {1: ((0,), False)}


@pytest.mark.parametrize("n_complete", range(2 * N_LAYERS))
def test_a_step_that_is_stopped_tells_servers_to_expect_no_more(n_complete: int) -> None:
    rank = running_rank(ALONE)
    ticks = [*map(forward, range(N_LAYERS)), *map(backward, reversed(range(N_LAYERS)))]
    for tick in ticks[:n_complete]:
        rank.complete(tick, epoch=1)
    stopped = rank.running().stop()
    assert stopped == [instructions.EndLane(ticks[n_complete], 1)]
    assert rank.running().is_complete
    assert not of_type(rank.machine.end_step(0, ""), instructions.ReportGivenUp)
    assert answer(rank.recover(2))[0] == ((2 * N_LAYERS,), True)


def test_a_rank_that_goes_home_tells_servers_from_where_on() -> None:
    rank = running_rank(ALONE)
    rank.complete(forward(0), epoch=1)
    rank.send(forward(1), epoch=1)
    rank.running().server_failed(forward(1), 1, "server-1", "it was lost", "why", 0.0)
    assert rank.machine.go_home(0, 1.0) == [instructions.EndLane(backward(1), 1)]
    assert not rank.running().can_go_home
    rank.running().computed(forward(1))
    for tick in (backward(1), backward(0)):
        assert rank.call(tick) is None
        rank.running().computed(tick)
    assert rank.running().is_complete
    assert answer(rank.recover(2))[0] == ((2 * N_LAYERS,), False)
    assert rank.plan(0, 2)[-1] == instructions.EndLane(forward(0), 2)


def test_servers_of_a_plan_that_was_not_entered_do_not_wait_for_a_rank_at_home() -> None:
    rank = Rank(ALONE)
    rank.hand_in(0)
    rank.begin(0)
    rank.plan(0, 1)
    rank.machine.unreachable(0, 1, "connect failed", {"server-1": "refused"})
    assert rank.machine.go_home(0, 0.0) == [instructions.EndLane(forward(0), 1)]


def test_a_plan_that_comes_too_late_has_servers_told_that_the_rank_takes_no_part() -> None:
    rank = Rank(ALONE)
    rank.hand_in(0, 1)
    rank.begin(0)
    assert rank.machine.go_home(0, 0.0) == []
    for tick in [*map(forward, range(N_LAYERS)), *map(backward, reversed(range(N_LAYERS)))]:
        assert rank.call(tick) is None
        rank.running().computed(tick)
    rank.machine.end_step(0, "")
    assert rank.plan(0, 1)[-1] == instructions.EndLane(forward(0), 1)
    rank.begin(1)
    (connect,) = of_type(rank.plan(1, 1), instructions.Connect)
    assert connect.first_step == 1


@pytest.mark.parametrize("case", ["shared", "under way", "without a plan"])
def test_a_step_that_somebody_waits_for_is_not_stopped(case: str) -> None:
    rank = running_rank(SHARED if case == "shared" else ALONE)
    if case == "under way":
        rank.send(forward(0), epoch=1)
    elif case == "without a plan":
        rank.recover(2)
    assert rank.running().stop() == []
    assert not rank.running().is_complete
