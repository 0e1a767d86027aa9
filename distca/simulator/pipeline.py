"""Pipeline schedules: 1F1B of independent stages, and the pooled ticks of disaggregation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array
from distca.simulator.errors import InputError, require_count


def one_f_one_b_order(stage: int, n_stages: int, n_microbatches: int) -> list[tuple[str, int]]:
    """What ``stage`` runs, in order: ``("F", i)`` and ``("B", i)`` of each microbatch i.

    ``n_stages - 1 - stage`` forwards to warm up, then one forward and one backward in turn, then
    the remaining backwards (PipeDream-Flush).
    """
    warm_up = min(n_microbatches, n_stages - 1 - stage)
    order = [("F", i) for i in range(warm_up)]
    for i in range(n_microbatches - warm_up):
        order += [("F", warm_up + i), ("B", i)]
    order += [("B", i) for i in range(n_microbatches - warm_up, n_microbatches)]
    return order


def one_f_one_b_seconds(
    forward_seconds: Float64Array, backward_seconds: Float64Array, n_stages: int
) -> Float64Array:
    """Seconds of one pass of 1F1B in each of several pipelines.

    Args:
        forward_seconds: ``[n_microbatches, n_pipelines]`` of one stage; stages are alike.
        backward_seconds: likewise.
        n_stages: 1 or more.

    Returns:
        ``[n_pipelines]``; equal microbatches take ``(m + p - 1) * (f + b)``.
    """
    require_count("n_stages", n_stages)
    if forward_seconds.shape != backward_seconds.shape or forward_seconds.ndim != 2:
        raise InputError(
            f"forward_seconds {forward_seconds.shape} and backward_seconds "
            f"{backward_seconds.shape} must both be [n_microbatches, n_pipelines]"
        )
    n_microbatches, n_pipelines = forward_seconds.shape
    orders = [one_f_one_b_order(s, n_stages, n_microbatches) for s in range(n_stages)]
    end: dict[tuple[str, int, int], Float64Array] = {}
    free = np.zeros((n_stages, n_pipelines))
    position = [0] * n_stages
    while any(position[s] < len(orders[s]) for s in range(n_stages)):
        for stage in range(n_stages):
            while position[stage] < len(orders[stage]):
                kind, i = orders[stage][position[stage]]
                ready = _ready_at(kind, i, stage, n_stages, end)
                if ready is None:
                    break
                took = forward_seconds[i] if kind == "F" else backward_seconds[i]
                free[stage] = np.maximum(free[stage], ready) + took
                end[kind, stage, i] = free[stage].copy()
                position[stage] += 1
    return np.asarray(free.max(axis=0))


def _ready_at(
    kind: str, i: int, stage: int, n_stages: int, end: dict[tuple[str, int, int], Float64Array]
) -> Float64Array | float | None:
    """When the input of (kind, i) is at ``stage``; None if what makes it has not run."""
    if kind == "F":
        return 0.0 if stage == 0 else end.get(("F", stage - 1, i))
    if stage == n_stages - 1:
        return end.get(("F", stage, i))
    return end.get(("B", stage + 1, i))


@dataclass(frozen=True)
class PooledTick:
    """The microbatches that all stages run at the same time, in the same phase.

    Attributes:
        forward: ``[n_stages]`` microbatch of each stage in the forward tick, None where it idles.
        backward: ``[n_stages]`` likewise in the backward tick of the same microbatches.
    """

    forward: tuple[int | None, ...]
    backward: tuple[int | None, ...]

    @property
    def n_active(self) -> int:
        return sum(i is not None for i in self.forward)


def pooled_ticks(n_stages: int, n_microbatches: int) -> Iterator[PooledTick]:
    """The ``m + p - 1`` pairs of ticks of a step.

    In forward tick k stage s runs microbatch ``k - s``; in backward tick k it runs
    ``k - (p - 1 - s)``: the same microbatches on mirrored stages. Forward tick ``k + p - 1`` comes
    right before backward tick k, so all stages are always in one phase. Against 1F1B, early
    stages run their backwards later, in what were bubbles at the end (paper, section 4.4); the
    price is up to ``2 p - 1`` microbatches in flight on the first stage where 1F1B has p.
    """
    require_count("n_stages", n_stages)
    require_count("n_microbatches", n_microbatches)
    for tick in range(n_microbatches + n_stages - 1):
        forward = tuple(
            tick - s if 0 <= tick - s < n_microbatches else None for s in range(n_stages)
        )
        yield PooledTick(forward, forward[::-1])
