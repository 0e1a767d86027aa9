"""Plain packing as a way of benchmarks: the same code, under a plan that moves nothing."""

from __future__ import annotations

from distca.train.measurements import StepMeasurements

TOLERANCES = {"plain": 1000.0, "served": 0.03}
"""Of sessions, by the way; one of 1000 leaves every document at home."""


def seconds_lost(seen: StepMeasurements, n_layers: int) -> float:
    """Seconds of core attention that the busiest rank of each tick has beyond the mean, if
    everything stays at home, as forecast; of all ticks of a step in ``n_layers`` layers."""
    home = seen.home_seconds * n_layers
    return float((home.max(axis=1) - home.mean(axis=1)).sum())
