"""The slots of a schedule as columns: what runs where, and what is planned together.

Documents that run in the same slots are planned together, as a *unit*. They are of one phase, and
of each rank one microbatch at most, as a rank runs one at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import REMEMBERED
from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.ca_task import Phase
from core_attention.pipelining import Pipelining


class Span(NamedTuple):
    """One action in the table of slots.

    Attributes:
        begin, end: the slots it takes, half-open.
        layers: calls of core attention in it.
    """

    begin: int
    end: int
    layers: int


class Timetable(NamedTuple):
    """A pipelining as columns that compiled code reads. All are read-only.

    Attributes:
        phase: ``[n_units]`` index of each unit's phase; units in the order in which they are
            planned.
        first_span: ``[n_units + 1]`` bounds of each unit's entries in ``spans``.
        spans: ``[n_spans, 3]`` a :class:`Span` for each stage that a rank has.
        layers: ``[n_units]`` of all stages of a rank.
        unit_of: ``[2, n_pipeline_ranks, n_microbatches]`` by phase.
        microbatch: ``[n_slots, n_pipeline_ranks]`` what runs, 0 where a rank idles.
        token_seconds: ``[n_slots, n_pipeline_ranks]`` seconds of one token beside attention, 0
            where a rank idles.
        pipeline_rank: ``[n_ranks]``.
        max_layers: of the rank that has most.
    """

    phase: Int64Array
    first_span: Int64Array
    spans: Int64Array
    layers: Int64Array
    unit_of: Int64Array
    microbatch: Int64Array
    token_seconds: Float64Array
    pipeline_rank: Int64Array
    max_layers: int


@lru_cache(maxsize=REMEMBERED)
def timetable(pipelining: Pipelining) -> Timetable:
    """The columns of ``pipelining``."""
    schedule, n_slots = pipelining.schedule, pipelining.kind_slots
    slots = pipelining.slots
    microbatch = np.zeros((len(slots), schedule.n_ranks), dtype=np.int64)
    token_seconds = np.zeros((len(slots), schedule.n_ranks))
    actions: dict[tuple[Phase, int, int], dict[int, Span]] = {}
    for at, slot in enumerate(slots):
        for rank, action in enumerate(slot):
            if action is None:
                continue
            microbatch[at, rank] = action.microbatch
            seconds = pipelining.seconds(action.stage, action.kind)
            token_seconds[at, rank] = seconds / n_slots[action.kind]
            phase = action.kind.attention_phase
            if phase is not None:
                of_stage = actions.setdefault((phase, rank, action.microbatch), {})
                begin = of_stage[action.stage].begin if action.stage in of_stage else at
                of_stage[action.stage] = Span(begin, at + 1, pipelining.layers[action.stage])
    spans_of = {
        key: tuple(sorted(of_stage.values(), key=lambda span: span.begin))
        for key, of_stage in actions.items()
    }
    distinct = {(its, phase) for (phase, _, _), its in spans_of.items()}
    # Backwards first: their pieces are the larger ones, and forwards fill up what they leave.
    units = sorted(distinct, key=lambda unit: (unit[0], unit[1] is Phase.FORWARD))
    index = {unit: at for at, unit in enumerate(units)}
    unit_of = np.zeros((2, schedule.n_ranks, schedule.n_microbatches), dtype=np.int64)
    for (phase, rank, i), its in spans_of.items():
        unit_of[PHASE_INDEX[phase], rank, i] = index[its, phase]
    n_spans = [len(its) for its, _ in units]
    return Timetable(
        frozen(np.array([PHASE_INDEX[phase] for _, phase in units], dtype=np.int64)),
        frozen(np.append(0, np.cumsum(n_spans)).astype(np.int64)),
        frozen(np.array([span for its, _ in units for span in its], dtype=np.int64)),
        frozen(np.array([sum(span.layers for span in its) for its, _ in units], dtype=np.int64)),
        frozen(unit_of),
        frozen(microbatch),
        frozen(token_seconds),
        frozen(np.array(pipelining.pipeline_ranks, dtype=np.int64)),
        pipelining.max_layers,
    )
