"""What plain packing loses to imbalance: between waits, a rank's ticks make up for one another."""

import numpy as np
import pytest

from benchmarks.gpu.plain_packing import seconds_lost
from distca.train.measurements import StepMeasurements


@pytest.mark.parametrize(
    ("wait_in_layers", "lost"),
    [
        # Forward 5 and 5, backward 12 and 8, against a mean of 5 and 10.
        pytest.param(True, 2.0, id="a wait in each layer"),
        # 17 and 13, against 15.
        pytest.param(False, 2.0, id="a wait a step"),
    ],
)
def test_nano_batches_of_a_phase_make_up_for_one_another(wait_in_layers: bool, lost: float) -> None:
    home = [[1, 4], [4, 1], [6, 3], [6, 5]]
    assert seconds_lost(measured(home), 3, wait_in_layers=wait_in_layers) == pytest.approx(3 * lost)


@pytest.mark.parametrize(
    ("wait_in_layers", "lost"),
    [
        pytest.param(True, 6.0, id="a wait in each layer"),
        pytest.param(False, 2.0, id="a wait a step"),
    ],
)
def test_phases_make_up_for_one_another_only_without_waits_between(
    wait_in_layers: bool, lost: float
) -> None:
    home = [[4, 0], [2, 2], [1, 8], [2, 3]]
    assert seconds_lost(measured(home), 1, wait_in_layers=wait_in_layers) == pytest.approx(lost)


def measured(home: list[list[int]]) -> StepMeasurements:
    """Of two ranks, by tick: two nano-batches of the forward pass, then two of the backward."""
    seconds = np.array(home, dtype=float)
    return StepMeasurements(
        plan=None,  # type: ignore[arg-type]  # Not looked at.
        plan_seconds=0.0,
        home_seconds=seconds,
        planned_seconds=seconds,
        measured_seconds=None,
    )
