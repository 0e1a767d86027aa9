"""A running step: under which plan it runs, and what becomes of each of its ticks."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.machine.instructions import (
    CountRecovery,
    EndLane,
    Instruction,
    LetGo,
    Progress,
    ReportLost,
    ReportReplay,
    SendTick,
    TakeIn,
)
from trainer_client.machine.lane import BegunTick, LaneMachine
from trainer_client.machine.outlines import Cause, Plan, PlanOutline


class State(Enum):
    """A step's relation to its plan."""

    WAITING = auto()
    """It has none; ticks that begin wait for one."""
    REPLAYING = auto()
    """The ticks that have begun are being sent under it; ticks that begin wait for their turn."""
    IN_FORCE = auto()
    """Ticks are sent under it as they begin."""


class StepMachine(Generic[Plan, Cause]):
    """Follows one step of a rank, from its beginning until every rank has finished it.

    Args:
        step: its number.
        lanes: its nano-batches.
        n_layers: ticks of a forward pass.
        patience_seconds: how long it may be without a plan.
        now: when it begins.

    Attributes:
        outline: of the plan that is in force or being replayed; None while there is none.
        closed: its block has ended.
        abandoned: it ended before its ticks were complete.
        at_home: this rank computes the ticks that are not complete itself, and takes part in no
            plan of the step any more.
        failure: why it cannot go on; empty while it may.
        trouble: why it has no plan, for the error if it never gets one.
    """

    def __init__(
        self,
        step: int,
        lanes: Sequence[LaneMachine],
        *,
        n_layers: int,
        patience_seconds: float,
        now: float,
    ) -> None:
        self.step = step
        self.lanes = lanes
        self.state = State.WAITING
        self.outline: PlanOutline[Plan] | None = None
        self.closed = False
        self.abandoned = False
        self.at_home = False
        self.failure = ""
        self.trouble = "no plan has come"
        self._n_layers, self._patience_seconds = n_layers, patience_seconds
        self._without_plan_since = now
        self._replayed: list[Tick] = []

    @property
    def is_complete(self) -> bool:
        """Return whether every tick that servers expect of this rank is complete."""
        return all(lane.is_over for lane in self.lanes)

    @property
    def may_be_asked(self) -> bool:
        """Return whether another rank may still need rows of this one, or this one has not
        finished."""
        return not self.abandoned and (
            not self.closed or any(lane.outline.is_shared for lane in self.lanes)
        )

    @property
    def awaits_plan(self) -> bool:
        """Return whether a plan is to come, or to be replayed."""
        return self.may_be_asked and not self.at_home and self.state is not State.IN_FORCE

    @property
    def can_go_home(self) -> bool:
        """Return whether its ticks may be computed here: neither does another rank need rows of
        this one, nor this one theirs."""
        shared = any(lane.outline.is_shared for lane in self.lanes)
        return not (shared or self.at_home or self.abandoned or self.failure)

    @property
    def progress(self) -> Progress:
        """The answer to a recovery. Of an abandoned step nothing will be sent again; at home
        nothing is left for servers."""
        ticks = tuple(
            0 if self.abandoned else lane.n_ticks if self.at_home else lane.progress
            for lane in self.lanes
        )
        return Progress(self.step, ticks, self.closed or self.abandoned)

    def is_under(self, epoch: int) -> bool:
        """Return whether the plan of ``epoch`` is in force or being replayed."""
        return self.outline is not None and self.outline.epoch == epoch

    def leave_plan(self, trouble: str, now: float) -> list[Instruction[Plan, Cause]]:
        """The plan is void: no tick is under way any more."""
        if self.outline is not None:
            self.outline, self.state = None, State.WAITING
            self._without_plan_since = now
        self.trouble = trouble
        return [each for lane in self.lanes for each in lane.leave()]

    def enter_plan(self, outline: PlanOutline[Plan], now: float) -> list[Instruction[Plan, Cause]]:
        """There are connections to all servers of a plan: what has begun is sent again."""
        if self.at_home:
            return self.take_no_part(outline.epoch)
        if not self.may_be_asked or self.is_under(outline.epoch):
            return []
        out = self.leave_plan("another plan has come", now)
        self.outline, self.state = outline, State.REPLAYING
        self._replayed = []
        return out + self._replay(outline, now)

    def replay_sent(self, epoch: int, now: float) -> list[Instruction[Plan, Cause]]:
        """The ticks to be replayed have been sent; more may have begun meanwhile."""
        outline = self.outline
        if self.state is not State.REPLAYING or outline is None or outline.epoch != epoch:
            return []
        return self._replay(outline, now)

    def begin(self, tick: Tick) -> SendTick | None:
        """The training loop has the rows of a tick. None: they are sent when a plan comes."""
        if self.abandoned:
            return None
        begun = self.lanes[tick.nano_batch].begin(tick, tick.lane_index(self._n_layers))
        if self.state is State.IN_FORCE and self.outline is not None:
            return self._send(begun, self.outline.epoch)
        return None

    def under_way(self, tick: Tick, epoch: int) -> bool:
        """All requests of a tick have been handed over. Whether its replies are still wanted."""
        if not self.is_under(epoch):
            return False
        self.at(tick).under_way_in = epoch
        return True

    def not_sent(self, tick: Tick, epoch: int) -> None:
        """The plan was void before any request of a tick was handed over."""
        if self.at(tick).sent_in == epoch:
            self.at(tick).sent_in = 0

    def replies_here(self, tick: Tick, epoch: int) -> bool:
        """All replies to a tick have arrived. Whether they are to be examined; then
        :meth:`examined` or :meth:`server_failed` is next."""
        begun = self.at(tick)
        if begun.under_way_in != epoch:
            return False
        begun.examined_in = epoch
        return True

    def examined(self, tick: Tick, epoch: int) -> list[Instruction[Plan, Cause]]:
        """Nothing is wrong with the replies to a tick."""
        begun, lane = self.at(tick), self.lanes[tick.nano_batch]
        if not begun.end_examination(epoch):
            return [LetGo(tick, epoch)]
        return [TakeIn(tick, epoch), *lane.complete(begun), *self._end_lane(tick.nano_batch)]

    def server_failed(
        self, tick: Tick, epoch: int, server_id: str, cause: Cause, detail: str, now: float
    ) -> list[Instruction[Plan, Cause]]:
        """A server cannot be sent to, owes a reply that will not come, or has given a wrong one.
        (This process's own server may only have learnt of a recovery before this rank: then the
        report is of an epoch that is over.)"""
        begun, out = self.at(tick), list[Instruction[Plan, Cause]]()
        if begun.examined_in == epoch:
            begun.end_examination(epoch)
            out.append(LetGo(tick, epoch))
        if not self.is_under(epoch):
            return out
        lost = ReportLost(server_id, epoch, cause, f"{tick}: {detail}")
        return [*out, *self.leave_plan(lost.detail, now), lost]

    def go_home(self, now: float) -> list[Instruction[Plan, Cause]]:
        """This rank computes the ticks that are not complete itself; see ``can_go_home``. Servers
        that know of a plan are still to learn it: :meth:`take_no_part`."""
        out = self.leave_plan("it is computed at home", now)
        self.at_home = True
        return out

    def take_no_part(self, epoch: int) -> list[Instruction[Plan, Cause]]:
        """Under the plan of ``epoch``, servers expect ticks that will not come."""
        ends = [(nano_batch, lane.end_under(epoch)) for nano_batch, lane in enumerate(self.lanes)]
        return [
            EndLane(self._tick_at(nano_batch, end), epoch)
            for nano_batch, end in ends
            if end is not None
        ]

    def computed(self, tick: Tick) -> list[Instruction[Plan, Cause]]:
        """A tick was computed here."""
        return [*self.lanes[tick.nano_batch].complete(self.at(tick))]

    def still_waiting(self, now: float, *, can_be_planned: bool) -> None:
        """The training loop waits for a tick that is not under way; ``can_be_planned`` while the
        control plane can be reached."""
        if not can_be_planned:
            # Nobody can make a plan now; the link has a deadline of its own.
            self._without_plan_since = now
        elif self.outline is None and now - self._without_plan_since > self._patience_seconds:
            self.fail(
                f"the step is without a plan for {self._patience_seconds:g} s after: "
                f"{self.trouble}; see the control plane's log"
            )

    def fail(self, why: str) -> None:
        """It cannot go on."""
        self.failure = self.failure or why

    @property
    def can_stop(self) -> bool:
        """True if no tick is under way and no other rank needs rows of this one."""
        return all(lane.can_stop for lane in self.lanes)

    def stop(self) -> list[EndLane]:
        """Ends its lanes where they are, if a plan is in force, no tick is under way and no other
        rank needs rows of this one; else changes nothing."""
        if not (self.at_home or self.state is State.IN_FORCE) or not self.can_stop:
            return []
        for lane in self.lanes:
            lane.stop()
        return [
            each for nano_batch in range(len(self.lanes)) for each in self._end_lane(nano_batch)
        ]

    def abandon(self) -> list[Instruction[Plan, Cause]]:
        """Its ticks will neither be completed nor replayed."""
        self.abandoned = True
        return self.forget()

    def forget(self) -> list[Instruction[Plan, Cause]]:
        """It takes no replies and no plan any more."""
        self.outline, self.state = None, State.WAITING
        return self.release()

    def release(self) -> list[Instruction[Plan, Cause]]:
        """Nobody asks for anything again."""
        return [each for lane in self.lanes for each in lane.release()]

    def at(self, tick: Tick) -> BegunTick:
        """The state of a tick that has begun."""
        return self.lanes[tick.nano_batch][tick.lane_index(self._n_layers)]

    def _replay(self, outline: PlanOutline[Plan], now: float) -> list[Instruction[Plan, Cause]]:
        """The ticks that are still to be sent under a plan; if there are none, it is in force."""
        unsent = [
            begun
            for lane, first in zip(self.lanes, outline.first_ticks, strict=True)
            for begun in lane.unsent(outline.epoch, first)
        ]
        gone = [begun.tick for begun in unsent if not begun.is_kept]
        if gone:
            self.fail(f"{gone[0]} is to be replayed, and its rows are kept no longer")
            return []
        if unsent:
            self._replayed += [begun.tick for begun in unsent]
            sends = [self._send(begun, outline.epoch) for begun in unsent]
            return [*sends, ReportReplay(self.step, outline.epoch)]
        self.state = State.IN_FORCE
        out: list[Instruction[Plan, Cause]] = [
            each for nano_batch in range(len(self.lanes)) for each in self._end_lane(nano_batch)
        ]
        if self._replayed:
            seconds = now - self._without_plan_since
            out.append(CountRecovery(self.step, outline.epoch, seconds, tuple(self._replayed)))
        return out

    def _send(self, begun: BegunTick, epoch: int) -> SendTick:
        begun.sent_in = epoch
        return SendTick(begun.tick, epoch, only_rows=begun.is_complete)

    def _end_lane(self, nano_batch: int) -> list[EndLane]:
        """The end of a lane that is over before its last tick, for servers that expect another."""
        lane = self.lanes[nano_batch]
        end = lane.end
        if self.state is not State.IN_FORCE or self.outline is None or end is None:
            return []
        if not lane.is_over:
            return []
        return [EndLane(self._tick_at(nano_batch, end), self.outline.epoch)]

    def _tick_at(self, nano_batch: int, index: int) -> Tick:
        phase, layer = Phase.FORWARD, index
        if index >= self._n_layers:
            phase, layer = Phase.BACKWARD, 2 * self._n_layers - 1 - index
        return Tick(self.step, layer, nano_batch, phase)
