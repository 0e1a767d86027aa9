"""Measured times correct the speeds that later steps are planned with."""

from __future__ import annotations

import pytest

from control_plane.jobs.server_speeds import (
    DAMPING,
    DEAD_BAND,
    FASTEST,
    LARGEST_STEP,
    SLOWEST,
    ServerSpeeds,
)


def follow(true_speed: float, *, steps: int, steps_ahead: int) -> list[float]:
    """The corrections over a run in which plans are made ``steps_ahead`` steps early."""
    speeds = ServerSpeeds()
    planned = [1.0] * steps_ahead
    seen = []
    for _ in range(steps):
        planned.append(speeds.of("node"))
        speed = planned.pop(0)
        speeds.measured(
            "node",
            planned_speed=speed,
            predicted_seconds=1.0 / speed,
            measured_seconds=1.0 / true_speed,
        )
        seen.append(speeds.of("node"))
    return seen


@pytest.mark.parametrize("steps_ahead", [0, 1, 4, 10])
@pytest.mark.parametrize("true_speed", [0.25, 0.8, 3.0])
def test_a_speed_is_found_without_overshoot(true_speed: float, steps_ahead: int) -> None:
    seen = follow(true_speed, steps=60, steps_ahead=steps_ahead)
    # Deviations of 2% count as noise and are left alone.
    assert seen[-1] == pytest.approx(true_speed, rel=0.021)
    low, high = sorted((1.0, true_speed))
    assert all(low * 0.99 <= speed <= high * 1.01 for speed in seen)
    distances = [abs(speed - true_speed) for speed in seen]
    assert distances == sorted(distances, reverse=True)


def test_a_server_that_was_not_measured_keeps_its_speed() -> None:
    speeds = ServerSpeeds()
    assert speeds.of("node") == 1.0
    speeds.measured("node", planned_speed=1.0, predicted_seconds=0.0, measured_seconds=1.0)
    assert speeds.of("node") == 1.0
    speeds.measured("node", planned_speed=1.0, predicted_seconds=1.0, measured_seconds=0.0)
    assert speeds.snapshot() == {}


@pytest.mark.parametrize(
    ("measured", "speed"),
    [
        pytest.param(1 + 0.9 * DEAD_BAND, 1.0, id="noise"),
        pytest.param(1 / (1 + 0.9 * DEAD_BAND), 1.0, id="noise, faster"),
        pytest.param(2.0, 0.5**DAMPING, id="a part of the way"),
        pytest.param(1e6, 1 / LARGEST_STEP, id="a wild measurement"),
        pytest.param(1e-6, LARGEST_STEP, id="a wild measurement, faster"),
    ],
)
def test_a_measurement_moves_a_speed_by_a_bounded_part(measured: float, speed: float) -> None:
    speeds = ServerSpeeds()
    speeds.measured("node", planned_speed=1.0, predicted_seconds=1.0, measured_seconds=measured)
    assert speeds.of("node") == pytest.approx(speed)


def test_speeds_have_bounds() -> None:
    assert follow(1e-6, steps=60, steps_ahead=0)[-1] == SLOWEST
    assert follow(1e6, steps=60, steps_ahead=0)[-1] == FASTEST
