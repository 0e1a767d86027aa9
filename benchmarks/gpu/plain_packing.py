"""Plain packing as a way of benchmarks: the same code, under a plan that moves nothing."""

from __future__ import annotations

import numpy as np

from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase
from core_attention.pipelining import Pipelining
from core_attention.schedule import Kind
from distca.apps.report.measurements import StepMeasurements
from distca.apps.simulator.pipeline import schedule_seconds

TOLERANCES = {"plain": 1000.0, "served": 0.03}
"""Of sessions, by the way; one of 1000 leaves every document at home."""


def seconds_lost(seen: StepMeasurements, n_layers: int, *, wait_in_layers: bool) -> float:
    """Seconds of core attention that the busiest rank has beyond the mean, if everything stays at
    home, as forecast; of a step of ``n_layers`` layers.

    Ranks that wait for one another gain nothing from a tick in which they have less to do than the
    others, unless it is followed by one in which they have more, with no wait between.

    Args:
        wait_in_layers: whether ranks wait for one another in every layer, as those that gather its
            weights do: forward and backward are lost on their own then. Replicas that reduce
            gradients after the backward wait once a step.
    """
    phases = seen.home_seconds.reshape(len(Phase), -1, seen.home_seconds.shape[1]).sum(axis=1)
    home = n_layers * (phases if wait_in_layers else phases.sum(axis=0, keepdims=True))
    return float((home.max(axis=1) - home.mean(axis=1)).sum())


def pipeline_seconds_lost(seen: StepMeasurements, pipelining: Pipelining, tokens: int) -> float:
    """Seconds by which a step of pipelines is longer, with everything at home, than one whose core
    attention is spread evenly over the microbatches of all pipelines, as forecast.

    Pipelines wait for one another once a step, and their stages are taken to be alike.

    Args:
        tokens: of a microbatch.
    """
    schedule = pipelining.schedule
    firsts = [rank for rank, at in enumerate(pipelining.pipeline_ranks) if at == 0]
    layer = seen.home_seconds[:, firsts].reshape(
        len(Phase), schedule.n_microbatches, -1, len(firsts)
    )
    home = max(pipelining.layers) * layer.sum(axis=2)
    even = np.broadcast_to(home.mean(axis=(1, 2), keepdims=True), home.shape)
    return _step_seconds(pipelining, tokens, home) - _step_seconds(pipelining, tokens, even)


def _step_seconds(pipelining: Pipelining, tokens: int, attention: Float64Array) -> float:
    """Of the slowest pipeline, with ``[n_phases, n_microbatches, n_pipelines]`` seconds of core
    attention in every stage."""
    schedule = pipelining.schedule
    seconds = {}
    for kind in Kind:
        stages = [pipelining.seconds(stage, kind) for stage in range(schedule.n_stages)]
        seconds[kind] = np.full(attention.shape[1:], tokens * np.mean(stages))
        if kind.attention_phase is not None:
            seconds[kind] += attention[list(Phase).index(kind.attention_phase)]
    return float(schedule_seconds(schedule, seconds).max())
