"""Plain packing as a way of benchmarks: the same code, under a plan that moves nothing."""

from __future__ import annotations

from core_attention.ca_task import Phase
from distca.train.measurements import StepMeasurements

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
