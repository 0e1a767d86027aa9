"""The order in which the ranks of a job with pipelines come to their ticks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from core_attention.ca_task import Phase
from core_attention.pipelining import Pipelining
from core_attention.schedule import Kind
from core_attention.tick import Tick


class Turn(NamedTuple):
    """When a rank comes to a tick: the places of actions in what it runs.

    Attributes:
        earliest: from this action on the tick may come.
        latest: when the rank has ended this action, it has come. Later than ``earliest`` only
            where backwards have two parts and the stage is the first: frameworks run its core
            attention in either.
    """

    earliest: int
    latest: int


_Place = tuple[int, Phase, int]
"""Microbatch, phase and layer."""


@dataclass(frozen=True)
class TickOrder:
    """The actions of each rank, by their ticks.

    Attributes:
        rows: nano-batches of a microbatch.
        pipeline_ranks: ``[n_ranks]`` each rank's place in its pipeline.
        turns: ``[n_pipeline_ranks]`` the turn of each (microbatch, phase, layer of the job).
        turn_slots: ``[n_pipeline_ranks]`` by action of what it runs, its slots of the schedule.
    """

    rows: int
    pipeline_ranks: tuple[int, ...]
    turns: tuple[dict[_Place, Turn], ...]
    turn_slots: tuple[tuple[tuple[int, ...], ...], ...]

    def turn(self, rank: int, tick: Tick) -> Turn:
        """When ``rank`` comes to ``tick``, one of its own."""
        turns = self.turns[self.pipeline_ranks[rank]]
        return turns[tick.nano_batch // self.rows, tick.phase, tick.layer]

    def slots(self, rank: int, tick: Tick) -> tuple[int, ...]:
        """The slots of the schedule in which ``rank`` comes to ``tick``, one of its own, as far as
        the schedule shows."""
        earliest, latest = self.turn(rank, tick)
        slots = self.turn_slots[self.pipeline_ranks[rank]]
        return slots[earliest] if earliest == latest else slots[earliest] + slots[latest]

    def row(self, tick: Tick) -> int:
        """The number of a tick's nano-batch within its microbatch."""
        return tick.nano_batch % self.rows


def tick_order(pipelining: Pipelining, n_nano_batches: int) -> TickOrder:
    """The order of a job's ticks.

    Args:
        pipelining: of the job.
        n_nano_batches: of a step, a multiple of the schedule's microbatches.
    """
    schedule = pipelining.schedule
    return TickOrder(
        n_nano_batches // schedule.n_microbatches,
        tuple(pipelining.pipeline_ranks),
        tuple(_turns(pipelining, rank) for rank in range(schedule.n_ranks)),
        tuple(_turn_slots(pipelining, rank) for rank in range(schedule.n_ranks)),
    )


def _turn_slots(pipelining: Pipelining, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
    runs = [slot[pipeline_rank] for slot in pipelining.slots]
    order = pipelining.schedule.order(pipeline_rank)
    return tuple(tuple(at for at, run in enumerate(runs) if run == action) for action in order)


def _turns(pipelining: Pipelining, pipeline_rank: int) -> dict[_Place, Turn]:
    order = pipelining.schedule.order(pipeline_rank)
    place = {action: at for at, action in enumerate(order)}
    turns: dict[_Place, Turn] = {}
    for action, at in place.items():
        phase, latest = action.kind.attention_phase, at
        if phase is None:
            continue
        if action.stage == 0 and action.kind is Kind.BACKWARD_INPUT:
            latest = place[action._replace(kind=Kind.BACKWARD_WEIGHT)]
        for layer in pipelining.job_layers(action.stage):
            turns[action.microbatch, phase, layer] = Turn(at, latest)
    return turns
