"""How long a pipeline takes whose stages wait for one another only: without disaggregation."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from core_attention.arrays import Float64Array
from core_attention.schedule import Action, Kind, Schedule


def schedule_seconds(schedule: Schedule, seconds: Mapping[Kind, Float64Array]) -> Float64Array:
    """Seconds of one step in each of several pipelines, every rank running its order as early as
    its inputs allow.

    Args:
        schedule: its slots give the order only, not when something begins.
        seconds: ``[n_microbatches, n_pipelines]`` of one stage, for each kind that the schedule
            has; stages are alike.

    Returns:
        ``[n_pipelines]``; equal microbatches in 1F1B take ``(m + p - 1) * (f + b)``.
    """
    kinds = {action.kind for slot in schedule.slots for action in slot if action is not None}
    shapes = {kind: seconds[kind].shape if kind in seconds else None for kind in kinds}
    first = next(iter(shapes.values()))
    n_microbatches = schedule.n_microbatches
    if (
        first is None
        or len(first) != 2
        or first[0] != n_microbatches
        or set(shapes.values()) != {first}
    ):
        raise ValueError(
            f"schedule {schedule.name} needs seconds of {', '.join(sorted(kinds))}, each "
            f"[{n_microbatches}, n_pipelines]; their shapes are "
            f"{[shapes[kind] for kind in sorted(kinds)]}"
        )
    end: dict[Action, Float64Array] = {}
    free = np.zeros((schedule.n_ranks, first[1]))
    for slot in schedule.slots:
        for rank, action in enumerate(slot):
            if action is None:
                continue
            begin = free[rank]
            for needed in schedule.needs(action):
                begin = np.maximum(begin, end[needed])
            free[rank] = begin + seconds[action.kind][action.microbatch]
            end[action] = free[rank].copy()
    return np.asarray(free.max(axis=0))
