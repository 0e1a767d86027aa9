"""Corrections settle on the true speed, without oscillation, also when plans are made ahead."""

from __future__ import annotations

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.speed import DAMPING, DEAD_BAND, correct_speeds
from tests.support.planning_cases import SHAPE, in_place, stream_manifest


@pytest.mark.parametrize("steps_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("true_speed", [0.1, 0.5, 0.9, 3.0, 10.0])
def test_speeds_settle_without_oscillating(true_speed: float, steps_ahead: int) -> None:
    """The prediction of a step was made with the speed known ``steps_ahead`` steps earlier."""
    history = [1.0] * (steps_ahead + 1)
    for _ in range(120):
        used = history[-1 - steps_ahead]
        measured = 1.0 / true_speed
        history.append(float(correct_speeds([history[-1]], [1.0 / used], [measured])[0]))
    error = np.abs(np.log(np.array(history) / true_speed))
    # Within the dead band in the end, and never further away than it was at the start.
    assert error[-1] <= np.log1p(DEAD_BAND) + 1e-9
    assert error.max() <= error[0] + 1e-9
    # At most one swing to the other side, and a small one.
    beyond = np.sign(np.log(np.array(history) / true_speed)) != np.sign(-np.log(true_speed))
    assert error[beyond].max(initial=0.0) < 0.35 * error[0] + np.log1p(DEAD_BAND)


def test_noise_moves_nothing() -> None:
    noise = 1 + 0.9 * DEAD_BAND * np.random.default_rng(0).uniform(-1, 1, size=(100, 4))
    speeds = np.array([1.0, 0.5, 2.0, 1.0])
    for measured in noise:
        np.testing.assert_array_equal(correct_speeds(speeds, np.ones(4), measured), speeds)


def test_plans_do_not_oscillate() -> None:
    """Plan, measure on servers of other speeds than assumed, correct, plan again: the busiest
    server's time falls to the target load and stays there."""
    manifest = stream_manifest([30_000, 20_000] + [2_000] * 31, 4)
    true_speed = np.array([1.0, 0.5, 1.0, 2.0])
    speeds = np.ones(4)
    worst = []
    for _ in range(25):
        servers = [
            PlanningServer(server=s.server, host=s.host, profile=s.profile, speed=float(speed))
            for s, speed in zip(in_place(4), speeds, strict=True)
        ]
        plan = balanced.plan(manifest, servers, SHAPE, PlanningOptions(tolerance=0.02))
        assert plan.forward_forecast is not None
        predicted = plan.forward_forecast.seconds[0]
        measured = predicted * speeds / true_speed
        worst.append(measured.max() / measured.mean())
        speeds = correct_speeds(speeds, predicted, measured)
    # The dead band lets each speed be 2% off either way, on top of the tolerance.
    assert max(worst[-8:]) < 1.02 + 2 * DEAD_BAND + 0.02
    assert worst[0] > 1.3


def test_one_wild_measurement_moves_a_speed_by_a_bounded_factor() -> None:
    assert correct_speeds([1.0], [1.0], [1e6])[0] == pytest.approx(1 / 1.5)


def test_what_is_not_measured_stays() -> None:
    speeds = correct_speeds([1.0, 0.0, 0.7, 0.3], [1.0, 1.0, 0.0, 1.0], [np.nan, 1.0, 1.0, 0.0])
    np.testing.assert_array_equal(speeds, [1.0, 0.0, 0.7, 0.3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speeds": [1.0, 1.0]}, "shapes"),
        ({"damping": 0.0}, "damping is 0.0"),
        ({"measured_seconds": [-1.0]}, "measured_seconds holds -1.0"),
    ],
)
def test_bad_input_is_named(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "speeds": [1.0],
        "predicted_seconds": [1.0],
        "measured_seconds": [1.0],
        "damping": DAMPING,
    }
    with pytest.raises(ValueError, match=message):
        correct_speeds(**(arguments | change))  # type: ignore[arg-type]
