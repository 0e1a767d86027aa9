"""What a model of a job consists of, and the rules of recovery that it follows or breaks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from core_attention.ca_task import Phase
from core_attention.tick import Tick


class Plan(NamedTuple):
    """By document: the servers of its pieces, one for each of its ranks, and by step its first
    tick. Servers beyond the pool's are the ranks' own. The first ``finished_steps`` need none."""

    epoch: int
    servers: tuple[tuple[int, ...], ...]
    first_tick: tuple[tuple[int, ...], ...]
    finished_steps: int


@dataclass(frozen=True)
class Document:
    """A document of every step: its lane, and the ranks with its rows in the order of positions."""

    lane: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Rules of docs/fault_tolerance.md that hold between processes. A model in which one of them is
    broken must fail.

    Attributes:
        first_tick_is_least: a document's first tick is the least of its ranks' complete ticks, not
            the greatest.
        wait_for_all_answers: plans are made when all ranks have answered.
        servers_refuse_old: a server takes nothing of an epoch before the one it knows.
        epochs_survive: a control plane that starts again gives higher epochs than before.
        lanes_are_independent: what is sent again in one lane never waits for another lane.
        old_reports_change_nothing: a loss reported in an epoch that is over is ignored.
    """

    first_tick_is_least: bool = True
    wait_for_all_answers: bool = True
    servers_refuse_old: bool = True
    epochs_survive: bool = True
    lanes_are_independent: bool = True
    old_reports_change_nothing: bool = True


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The size of a model.

    Attributes:
        documents: of every step.
        n_ranks, n_servers, n_layers, n_lanes, n_steps: sizes.
        head_groups: ticks of a call; ``n_layers`` counts them.
        crashes: how often a pool server may die; it may come back.
        cuts: how often a rank may lose a pool server that lives.
        restarts: how often the control plane may die.
        threads: connecting, examining replies and reporting losses take any time, as if each rank's
            threads were slow; otherwise none.
        rules: what is followed.
    """

    documents: tuple[Document, ...]
    n_ranks: int = 2
    n_servers: int = 2
    n_layers: int = 1
    head_groups: int = 1
    n_lanes: int = 1
    n_steps: int = 1
    crashes: int = 0
    cuts: int = 0
    restarts: int = 0
    threads: bool = False
    rules: Rules = Rules()

    @property
    def ticks_per_step(self) -> int:
        """Ticks of one lane in one step: forward by layer, then backward mirrored."""
        return 2 * self.n_layers

    @property
    def last_place(self) -> int:
        """The place in :attr:`progress` at which a rank has finished all steps."""
        return len(self.progress) - 1

    @cached_property
    def progress(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By a rank's place in its program, by lane: (complete, begun) ticks over all steps.

        A rank's only waits are for its own ticks, in the order of ping-pong: forward, every lane is
        begun, then each in turn is collected and begun again; the backward pass begins when all
        lanes have ended the forward pass, and takes the lanes in the opposite order.
        """
        complete, begun = [0] * self.n_lanes, [0] * self.n_lanes
        places: list[tuple[tuple[int, int], ...]] = []

        def collect(lane: int) -> None:
            places.append(tuple(zip(complete, begun, strict=True)))
            complete[lane] += 1

        for _ in range(self.n_steps):
            for lanes in (range(self.n_lanes), range(self.n_lanes - 1, -1, -1)):
                for lane in lanes:
                    begun[lane] += self.head_groups
                for layer in range(0, self.n_layers, self.head_groups):
                    for lane in lanes:
                        for _ in range(self.head_groups):
                            collect(lane)
                        if layer < self.n_layers - self.head_groups:
                            begun[lane] += self.head_groups
        places.append(tuple(zip(complete, begun, strict=True)))
        return tuple(places)

    @cached_property
    def collects(self) -> tuple[tuple[int, int], ...]:
        """By a rank's place: the (lane, tick) that it waits for there."""
        waits = []
        for now, then in zip(self.progress, self.progress[1:], strict=False):
            lane = next(i for i in range(self.n_lanes) if now[i][0] != then[i][0])
            waits.append((lane, now[lane][0]))
        return tuple(waits)

    @cached_property
    def ticks(self) -> dict[tuple[int, int], Tick]:
        """By lane and place over all steps."""
        places = range(self.n_steps * self.ticks_per_step)
        return {(lane, at): self._tick(lane, at) for lane in range(self.n_lanes) for at in places}

    @cached_property
    def places(self) -> dict[Tick, tuple[int, int]]:
        """Of each tick, its lane and place over all steps."""
        return {tick: place for place, tick in self.ticks.items()}

    def _tick(self, lane: int, at: int) -> Tick:
        step, in_step = divmod(at, self.ticks_per_step)
        if self.is_backward(at):
            return Tick(step, self.ticks_per_step - 1 - in_step, lane, Phase.BACKWARD)
        return Tick(step, in_step, lane, Phase.FORWARD)

    def step_at(self, place: int) -> int:
        """The step that a rank runs, or is to begin, at a place in :attr:`progress`."""
        return place // (self.ticks_per_step * self.n_lanes)

    def is_backward(self, tick: int) -> bool:
        return tick % self.ticks_per_step >= self.n_layers
