"""Limited memory: never exceeded, and never so divided that nobody can go on."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_node.machine.tick_memory import Lane, MemoryTooSmall, TickMemory
from core_attention.ca_task import Phase
from core_attention.tick import Tick

JOB = "job"


def ticks(nano_batch: int, n_ticks: int, step: int = 0) -> list[Tick]:
    return [Tick(step, layer, nano_batch, Phase.FORWARD) for layer in range(n_ticks)]


def lane(nano_batch: int, *needs: int, step: int = 0) -> list[tuple[Tick, int]]:
    return list(zip(ticks(nano_batch, len(needs), step), needs, strict=True))


def test_what_is_left_over_is_lent_to_who_reads_ahead() -> None:
    memory = TickMemory(100)
    memory.add_step(JOB, {0: lane(0, 30, 30, 30), 1: lane(1, 40)})
    first, second, third = ticks(0, 3)
    assert memory.admit(JOB, first, first.nano_batch)
    assert memory.admit(JOB, second, second.nano_batch)
    assert not memory.admit(JOB, third, third.nano_batch)
    assert memory.admit(JOB, ticks(1, 1)[0], 1)
    memory.end(JOB, first, first.nano_batch)
    assert memory.admit(JOB, third, third.nano_batch)


def test_steps_that_are_given_up_free_their_memory() -> None:
    memory = TickMemory(100)
    memory.add_step(JOB, {0: lane(0, 90, step=3)})
    memory.add_step(JOB, {0: lane(0, 90, step=4)})
    (third,), (fourth,) = ticks(0, 1, 3), ticks(0, 1, 4)
    assert memory.admit(JOB, third, third.nano_batch)
    assert not memory.admit(JOB, fourth, fourth.nano_batch)
    memory.keep_steps([(JOB, 4)])
    assert memory.admit(JOB, fourth, fourth.nano_batch)
    memory.keep_steps([])
    memory.add_step("other", {0: lane(0, 100)})
    assert memory.admit("other", ticks(0, 1)[0], 0)


def test_step_that_is_planned_anew_may_begin_later() -> None:
    """Its first ticks are complete everywhere and will not come again."""
    memory = TickMemory(100)
    memory.add_step(JOB, {0: lane(0, 60, 60)})
    first, second = ticks(0, 2)
    assert memory.admit(JOB, first, first.nano_batch)
    memory.add_step(JOB, {0: lane(0, 60, 60)[1:]})
    assert memory.admit(JOB, second, second.nano_batch)


def test_step_that_is_planned_late_comes_first() -> None:
    memory = TickMemory(100)
    memory.add_step(JOB, {0: lane(0, 60, step=4)})
    memory.add_step(JOB, {0: lane(0, 60, step=3)})
    assert not memory.admit(JOB, ticks(0, 1, 4)[0], 0)
    assert memory.admit(JOB, ticks(0, 1, 3)[0], 0)


def test_plan_that_cannot_be_received_is_refused() -> None:
    memory = TickMemory(100)
    memory.add_step(JOB, {0: lane(0, 60)})
    with pytest.raises(MemoryTooSmall):
        memory.add_step(JOB, {0: lane(0, 10, step=1), 1: lane(1, 50, step=1)})
    memory.add_step(JOB, {0: lane(0, 10, step=1), 1: lane(1, 40, step=1)})


@dataclass(frozen=True)
class Case:
    """A job of several ranks: who takes part in which tick with how many bytes, and the order in
    which all of them run the lanes.

    Attributes:
        parts: by tick, bytes by rank.
        program: sends (True) and waits (False).
        spare_bytes: beyond the entitlements.
    """

    parts: dict[Tick, dict[int, int]]
    program: list[tuple[bool, Tick]]
    spare_bytes: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n_ranks = draw(st.integers(1, 4))
    n_lanes = draw(st.integers(1, 3))
    n_ticks = draw(st.integers(1, 5))
    in_turns = draw(st.booleans())
    everyone = [tick for nano in range(n_lanes) for tick in ticks(nano, n_ticks)]
    parts = {
        tick: draw(st.dictionaries(st.integers(0, n_ranks - 1), st.integers(1, 50), min_size=1))
        for tick in everyone
    }
    lanes = [ticks(nano, n_ticks) for nano in range(n_lanes)]
    if in_turns:
        # Ping-pong: all lanes send a tick before the first one is waited for.
        program = [
            (sends, lanes[nano][at])
            for at in range(n_ticks)
            for sends in (True, False)
            for nano in range(n_lanes)
        ]
    else:
        program = [(sends, tick) for tick in everyone for sends in (True, False)]
    return Case(parts, program, draw(st.integers(0, 100)))


@dataclass
class Simulation:
    """Ranks that run the program, and a server that posts receives two ticks ahead."""

    case: Case
    memory: TickMemory
    limit_bytes: int
    position: dict[int, int] = field(default_factory=dict)
    sent: set[tuple[int, Tick]] = field(default_factory=set)
    posted: set[tuple[int, Tick]] = field(default_factory=set)
    ended: set[Tick] = field(default_factory=set)

    def run(self, random_order: random.Random) -> None:
        ranks = sorted({rank for parts in self.case.parts.values() for rank in parts})
        self.position = dict.fromkeys(ranks, 0)
        while any(at < len(self.case.program) for at in self.position.values()):
            moves: list[int | str] = [*ranks, "server"]
            random_order.shuffle(moves)
            assert any(self._move(move) for move in moves), "nobody can go on"
            held = sum(
                self.case.parts[tick][rank] for rank, tick in self.posted if tick not in self.ended
            )
            assert held <= self.limit_bytes

    def _move(self, who: int | str) -> bool:
        return self._serve() if isinstance(who, str) else self._step(who)

    def _step(self, rank: int) -> bool:
        """One operation of a rank; False if it must wait."""
        if self.position[rank] == len(self.case.program):
            return False
        sends, tick = self.case.program[self.position[rank]]
        if rank in self.case.parts[tick]:
            if sends:
                self.sent.add((rank, tick))
            elif tick not in self.ended:
                return False
        self.position[rank] += 1
        return True

    def _serve(self) -> bool:
        moved = False
        for nano in sorted({tick.nano_batch for tick in self.case.parts}):
            for rank in self.position:
                mine = [
                    tick
                    for tick, parts in self.case.parts.items()
                    if tick.nano_batch == nano and rank in parts
                ]
                waiting = [t for t in mine if (rank, t) not in self.sent & self.posted][:2]
                for tick in waiting:
                    if (rank, tick) in self.posted:
                        continue
                    if not self.memory.admit(JOB, tick, tick.nano_batch):
                        break
                    self.posted.add((rank, tick))
                    moved = True
        for tick, parts in self.case.parts.items():
            here = all((rank, tick) in self.posted & self.sent for rank in parts)
            if tick not in self.ended and here:
                self.ended.add(tick)
                self.memory.end(JOB, tick, tick.nano_batch)
                moved = True
        return moved


@settings(max_examples=300)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_all_ranks_come_to_the_end_within_the_limit(case: Case, seed: int) -> None:
    needs = {tick: sum(parts.values()) for tick, parts in case.parts.items()}
    lanes: dict[Lane, list[tuple[Tick, int]]] = {}
    for tick, need in needs.items():
        lanes.setdefault(tick.nano_batch, []).append((tick, need))
    entitled = sum(max(need for _, need in each) for each in lanes.values())
    memory = TickMemory(entitled + case.spare_bytes)
    memory.add_step(JOB, lanes)
    Simulation(case, memory, entitled + case.spare_bytes).run(random.Random(seed))
