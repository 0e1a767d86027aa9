"""Corrections of the servers' speeds from measured times, damped so that plans do not oscillate.

A profile is measured alone on a quiet device; in a job a server may run faster or slower: clocks,
neighbours, heat. After each step the control plane compares what the plan predicted with what was
measured and corrects the speed that the next plan uses.

Plans are made ahead, so a correction shows in measurements only some steps later. A full correction
per step would be repeated until then and overshoot. Each step therefore goes only a part of the
way, in logarithms, so that halving and doubling weigh the same; small deviations, which are noise,
are left alone; and a single wild measurement moves a speed by a bounded factor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from core_attention.arrays import Float64Array

DAMPING = 0.2
"""Share of the deviation corrected per step: stable for plans made up to 3 steps ahead."""
DEAD_BAND = 0.02
"""Relative deviation that counts as noise."""
LARGEST_STEP = 1.5
"""Factor by which one measurement may change a speed at most."""
SLOWEST, FASTEST = 0.05, 20.0
"""Bounds of a correction: beyond them a server is not slow but broken, or its profile is."""


def correct_speeds(
    speeds: Sequence[float] | Float64Array,
    predicted_seconds: Sequence[float] | Float64Array,
    measured_seconds: Sequence[float] | Float64Array,
    *,
    damping: float = DAMPING,
) -> Float64Array:
    """The speeds for the next plan.

    Args:
        speeds: ``[n_servers]`` that the predictions were made with.
        predicted_seconds: ``[n_servers]`` busy seconds of the step's plan.
        measured_seconds: ``[n_servers]`` busy seconds measured; NaN or 0 where nothing was
            measured.
        damping: share of the deviation to correct, above 0 and up to 1.

    Returns:
        ``[n_servers]``; unchanged where nothing was predicted or measured, and at speed 0.
    """
    speed = np.asarray(speeds, dtype=np.float64)
    predicted = np.asarray(predicted_seconds, dtype=np.float64)
    measured = np.asarray(measured_seconds, dtype=np.float64)
    if not (speed.shape == predicted.shape == measured.shape and speed.ndim == 1):
        raise ValueError(
            f"speeds, predicted_seconds and measured_seconds have shapes {speed.shape}, "
            f"{predicted.shape} and {measured.shape}; they must be one-dimensional and alike"
        )
    if not 0 < damping <= 1:
        raise ValueError(f"damping is {damping}; it must be above 0 and at most 1")
    for name, values in (
        ("speeds", speed),
        ("predicted_seconds", predicted),
        ("measured_seconds", measured),
    ):
        if (values < 0).any():
            raise ValueError(f"{name} holds {values.min()}; it must be 0 or more")
    known = (speed > 0) & (predicted > 0) & (measured > 0)
    known &= np.isfinite(predicted) & np.isfinite(measured)
    deviation = np.zeros_like(speed)
    deviation[known] = np.log(predicted[known] / measured[known])
    deviation[np.abs(deviation) <= math.log1p(DEAD_BAND)] = 0.0
    largest = math.log(LARGEST_STEP)
    step = np.clip(damping * deviation, -largest, largest)
    bounded = np.clip(speed * np.exp(step), SLOWEST, FASTEST)
    return np.where(known & (step != 0.0), bounded, speed)
