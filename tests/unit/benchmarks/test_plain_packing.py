"""What plain packing loses to imbalance: between waits, a rank's ticks make up for one another."""

from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.gpu.plain_packing import pipeline_seconds_lost, seconds_lost
from core_attention.pipelining import Pipelining
from core_attention.schedule_orders import one_f_one_b
from distca.apps.report.measurements import StepMeasurements

NANO_BATCHES = [[1, 4], [4, 1], [6, 3], [6, 5]]
PHASES = [[4, 0], [2, 2], [1, 8], [2, 3]]


@pytest.mark.parametrize(
    ("home", "wait_in_layers", "lost"),
    [
        # Nano-batches of a phase make up for one another: forward 5 and 5, backward 12 and 8,
        # against a mean of 5 and 10; over the step 17 and 13, against 15.
        (NANO_BATCHES, True, 2.0),
        (NANO_BATCHES, False, 2.0),
        # Phases only without waits between.
        (PHASES, True, 6.0),
        (PHASES, False, 2.0),
    ],
)
def test_ticks_between_waits_make_up_for_one_another(
    home: Sequence[Sequence[int]], wait_in_layers: bool, lost: float
) -> None:
    assert seconds_lost(measured(home), 3, wait_in_layers=wait_in_layers) == pytest.approx(3 * lost)


@pytest.mark.parametrize("n_lanes", [1, 2])
def test_pipelines_wait_for_the_slowest(n_lanes: int) -> None:
    """Two of two stages, whose two microbatches take (2 + 2 - 1) times forward and backward."""
    pipelining = two_stages(n_pipelines=2, layers=3, forward_seconds=0.1)
    home = [[1, 3, 1, 3]] * 2 * n_lanes + [[2, 6, 2, 6]] * 2 * n_lanes
    slowest = 3 * (10 * 0.1 + 3 * 3 * n_lanes + 10 * 0.2 + 3 * 6 * n_lanes)
    even = 3 * (10 * 0.1 + 3 * 2 * n_lanes + 10 * 0.2 + 3 * 4 * n_lanes)
    lost = pipeline_seconds_lost(measured(home), pipelining, 10)
    assert lost == pytest.approx(slowest - even)


def test_microbatches_that_differ_cost_a_pipeline_time() -> None:
    """Of one alone: forward 1 and 3, backward 1 and 3, beside core attention as good as nothing."""
    pipelining = two_stages(n_pipelines=1, layers=1, forward_seconds=1e-12)
    home = [[1, 1], [3, 3], [1, 1], [3, 3]]
    # The last stage computes forward 0 from 1 to 2, backward 0, forward 1 from 4 to 7, and backward
    # 1 until 10, which the first one has until 13. Evenly it takes three times 2 + 2.
    assert pipeline_seconds_lost(measured(home), pipelining, 1) == pytest.approx(13 - 12)


def two_stages(*, n_pipelines: int, layers: int, forward_seconds: float) -> Pipelining:
    """In 1F1B order, with two microbatches; a backward takes twice the forward."""
    return Pipelining(
        schedule=one_f_one_b(2, 2),
        pipeline_ranks=[stage for stage in (0, 1) for _ in range(n_pipelines)],
        layers=(layers,) * 2,
        forward_seconds=(forward_seconds,) * 2,
        backward_seconds=(2 * forward_seconds,) * 2,
    )


def measured(home: Sequence[Sequence[int]]) -> StepMeasurements:
    """By tick: the nano-batches of the forward pass, then those of the backward."""
    seconds = np.array(home, dtype=float)
    return StepMeasurements(
        plan=None,  # type: ignore[arg-type]  # Not looked at.
        plan_seconds=0.0,
        home_seconds=seconds,
        planned_seconds=seconds,
        measured_seconds=None,
    )
