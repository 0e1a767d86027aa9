"""A rank of a model: the machine that runs in production, driven without threads or a network.

The shell here carries instructions out as the real one does. Connecting and examining replies wait
in queues, as if other threads did them; rows that are sent travel for any time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from tests.service.model.explorer import ModelViolation
from tests.service.model.setting import Plan, Setting
from trainer_client.machine import instructions
from trainer_client.machine.outlines import LaneOutline, PlanOutline
from trainer_client.machine.rank import RankMachine

NOWHERE = 10**6
"""A place behind all ticks of a lane."""


@dataclass(frozen=True)
class Recover:
    """A recovery begins."""

    epoch: int


@dataclass(frozen=True)
class Finished:
    """Every rank has finished the first ``steps``."""

    steps: int


class Rows(NamedTuple):
    """Rows of a tick on their way to servers."""

    lane: int
    tick: int
    plan: Plan


class PlanOwn(NamedTuple):
    """This rank's own server gets a plan."""

    plan: Plan


class RecoverOwn(NamedTuple):
    """This rank's own server hears of a recovery."""

    epoch: int


class Close(NamedTuple):
    """All connections end, and with them the replies on their way."""


class Answer(NamedTuple):
    """Of a recovery: by step and lane, how many ticks are complete."""

    epoch: int
    complete: tuple[tuple[int, ...], ...]


Done = PlanOwn | RecoverOwn | Close | Answer
"""What a rank does to others."""


class Lost(NamedTuple):
    """A loss that is to be reported."""

    server: int
    epoch: int


class ModelRank:
    """A rank's machine and what its shell holds.

    Args:
        setting: of the model.
        rank: which one.

    Attributes:
        place: how many ticks it has collected.
        step: the one that it has begun last.
        rows: those on their way.
        replay_place: its place when it connected, where the rule of independent lanes is broken:
            otherwise it would only multiply states.
        first_step: that its connections began with; None if it has none.
        connecting: what the recovery thread is to do.
        examining: replies that are being examined.
        kept: ticks, by lane and place, whose inputs are there.
        lost: losses to be reported.
        done: what it has done to others since that was last taken.
    """

    def __init__(self, setting: Setting, rank: int) -> None:
        self.setting = setting
        self.rank = rank
        self.machine: RankMachine[str, Plan, None] = RankMachine(
            setting.n_layers // setting.head_groups,
            setting.n_lanes,
            head_groups=setting.head_groups,
            recovery_timeout_seconds=math.inf,
        )
        self.place = 0
        self.step = -1
        self.replay_place = 0
        self.rows: set[Rows] = set()
        self.first_step: int | None = None
        self.connecting: list[instructions.Connect[Plan]] = []
        self.examining: list[tuple[Tick, int]] = []
        self.kept: set[tuple[int, int]] = set()
        self.lost: set[Lost] = set()
        self.done: list[Done] = []
        for step in range(setting.n_steps):
            self.machine.hand_in(step, "manifest")

    @property
    def finished_steps(self) -> int:
        """How many steps every rank has finished, as far as this one knows."""
        return sum(self.machine.is_finished(step) for step in range(self.setting.n_steps))

    @property
    def next_step(self) -> int | None:
        """The step that it is to begin now; None if it runs one, or all are over."""
        step = self.setting.step_at(self.place)
        return step if step > self.step and step < self.setting.n_steps else None

    def awaits(self, lane: int, tick: int) -> int | None:
        """The epoch in whose replies to a tick it waits; None if it waits for none."""
        which = self.setting.ticks[lane, tick]
        running = self.machine.running(which.step)
        if running is None or which.step != self.step or (lane, tick) not in self._begun():
            return None
        begun = running.at(which)
        return None if begun.examined_in is not None else begun.under_way_in

    def plan_of(self, step: int) -> Plan | None:
        """The plan that a running step is under."""
        running = self.machine.running(step)
        return running.outline.plan if running is not None and running.outline else None

    def reads(self, event: Plan | Recover | Finished) -> None:
        """It reads what the control plane has sent."""
        match event:
            case Plan():
                self.reads_plan(event)
            case Recover(epoch):
                self._follow(self.machine.recover(epoch, (), "a recovery", 0.0))
            case Finished(steps):
                self._follow(self.machine.all_finished(steps - 1))

    def reads_plan(self, plan: Plan) -> None:
        """Plans of all unfinished steps come, the last one first: that is the harder order."""
        for step in reversed(range(plan.finished_steps, self.setting.n_steps)):
            self._follow(self.machine.plan_came(self._outline(plan, step), 0.0))

    def begins(self, gone: frozenset[int]) -> None:
        """The training loop begins its next step; the servers ``gone`` cannot be reached."""
        step = self.next_step
        assert step is not None
        self.step = step
        lanes = tuple(self._lane_outline(lane) for lane in range(self.setting.n_lanes))
        waiting = list(self.connecting)
        self._follow(self.machine.begin_step(step, lanes, forward_only=False, now=0.0))
        # The training loop connects itself.
        self.connecting, mine = waiting, self.connecting[len(waiting) :]
        for connect in mine:
            self._connect(connect, gone)
        self._go_on()

    def connects(self, gone: frozenset[int]) -> None:
        """The recovery thread comes to what is next in its queue."""
        self._connect(self.connecting.pop(0), gone)

    def replies_here(self, lane: int, tick: int, epoch: int) -> None:
        """All replies to a tick are here."""
        which = self.setting.ticks[lane, tick]
        running = self.machine.running(which.step)
        if running is None or not running.replies_here(which, epoch):
            return
        self.examining.append((which, epoch))
        if not self.setting.threads:
            self.examined()

    def examined(self) -> None:
        """Nothing was wrong with the replies that are being examined."""
        tick, epoch = self.examining.pop(0)
        running = self.machine.running(tick.step)
        if running is not None:
            self._follow(running.examined(tick, epoch))

    def loses(self, lane: int, tick: int, epoch: int, server: int) -> None:
        """A tick cannot be sent to a server, or its reply will not come."""
        which = self.setting.ticks[lane, tick]
        running = self.machine.running(which.step)
        if running is not None:
            self._follow(running.server_failed(which, epoch, str(server), None, "lost", 0.0))

    def has_reported(self, lost: Lost) -> None:
        """The control plane has got the report of a loss."""
        self.lost.discard(lost)

    def _follow(self, done: list[instructions.Instruction[Plan, None]]) -> None:
        """Carries out what the machine says."""
        for each in done:
            self._carry_out(each)
        for step in range(self.setting.n_steps):
            running = self.machine.running(step)
            if running is not None and running.failure:
                raise ModelViolation(f"rank {self.rank}, step {step}: {running.failure}")

    def _carry_out(self, instruction: instructions.Instruction[Plan, None]) -> None:
        match instruction:
            case instructions.SendTick():
                self._send(instruction)
            case instructions.ReportReplay(step, epoch):
                self._follow(self.machine.replay_sent(step, epoch, 0.0))
            case instructions.TakeIn(tick):
                if self.setting.places[tick] != self.setting.collects[self.place]:
                    raise ModelViolation(f"rank {self.rank} takes {tick} in out of turn")
                self.place += 1
                self._go_on()
            case instructions.ForgetInputs(tick):
                self.kept.discard(self.setting.places[tick])
            case instructions.PlanOwnServer(outline):
                self.done.append(PlanOwn(outline.plan))
                self._follow(self.machine.own_server_planned(outline))
            case instructions.Connect():
                self.connecting.append(instruction)
            case instructions.CloseConnections():
                self.rows.clear()
                self.first_step = None
                self.done.append(Close())
            case instructions.RecoverOwnServer(epoch):
                self.done.append(RecoverOwn(epoch))
            case instructions.ReportProgress(epoch, steps):
                self.done.append(Answer(epoch, self._complete(steps)))
            case instructions.ReportLost(server_id, epoch):
                self.lost.add(Lost(int(server_id), epoch))
            case instructions.ReportGivenUp(step, why):
                raise ModelViolation(f"rank {self.rank} gives step {step} up: {why}")

    def _send(self, send: instructions.SendTick) -> None:
        running = self.machine.running(send.tick.step)
        if running is None or not running.is_under(send.epoch):
            return
        place = self.setting.places[send.tick]
        if place not in self.kept:
            raise ModelViolation(f"rank {self.rank} has to send {send.tick}, and its rows are gone")
        assert running.outline is not None
        self.rows.add(Rows(*place, running.outline.plan))
        if not send.only_rows:
            running.under_way(send.tick, send.epoch)

    def _connect(self, connect: instructions.Connect[Plan], gone: frozenset[int]) -> None:
        if not self.machine.is_wanted(connect.step, connect.epoch):
            return
        dead = gone & {server for pieces in connect.plan.servers for server in pieces}
        if dead:
            details = {str(server): "gone" for server in sorted(dead)}
            self._follow(self.machine.unreachable(connect.step, connect.epoch, None, details))
            return
        if self.first_step is None:
            self.first_step = connect.first_step
            if not self.setting.rules.lanes_are_independent:
                self.replay_place = self.place
        self._follow(self.machine.connected(connect.step, connect.epoch, 0.0))

    def _go_on(self) -> None:
        """The training loop begins the ticks that it can, or ends the step."""
        if self.setting.step_at(self.place) > self.step:
            self._follow(self.machine.end_step(self.step, ""))
            return
        running = self.machine.running(self.step)
        assert running is not None
        for lane, tick in sorted(self._begun()):
            which = self.setting.ticks[lane, tick]
            calls = running.lanes[lane].calls
            if which.lane_index(self.setting.n_layers) < running.lanes[lane].begun_ticks:
                continue
            if tick % self.setting.head_groups:
                pass
            elif which.phase is Phase.FORWARD:
                calls.forward(needs_backward=True)
            else:
                calls.backward(which.layer // self.setting.head_groups)
            self.kept.add((lane, tick))
            if send := running.begin(which):
                self._follow([send])

    def _begun(self) -> set[tuple[int, int]]:
        """The ticks of the running step that have begun at this place of the program."""
        first = self.step * self.setting.ticks_per_step
        return {
            (lane, tick)
            for lane, (_, begun) in enumerate(self.setting.progress[self.place])
            for tick in range(first, min(begun, first + self.setting.ticks_per_step))
        }

    def _complete(self, listed: tuple[instructions.Progress, ...]) -> tuple[tuple[int, ...], ...]:
        all_ticks = (self.setting.ticks_per_step,) * self.setting.n_lanes
        complete = {progress.step: progress.complete_ticks for progress in listed}
        return tuple(complete.get(step, all_ticks) for step in range(self.setting.n_steps))

    def _outline(self, plan: Plan, step: int) -> PlanOutline[Plan]:
        first_ticks = tuple(
            min(
                (
                    first
                    for document, first in zip(
                        self.setting.documents, plan.first_tick[step], strict=True
                    )
                    if document.lane == lane and self.rank in document.ranks
                ),
                default=NOWHERE,
            )
            for lane in range(self.setting.n_lanes)
        )
        return PlanOutline(step, plan.epoch, plan, first_ticks)

    def _lane_outline(self, lane: int) -> LaneOutline:
        mine = [d for d in self.setting.documents if d.lane == lane and self.rank in d.ranks]
        return LaneOutline(bool(mine), any(len(d.ranks) > 1 for d in mine))


def take_done(rank: ModelRank) -> tuple[Done, ...]:
    """What it has done to others since this was last called."""
    done, rank.done = tuple(rank.done), []
    return done
