"""Random schedules of faults: three here, fifty each night."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cluster.chaos.scenario import References
from tests.cluster.chaos.schedules import SCHEDULES
from tests.cluster.chaos.standstills import BOUND_SECONDS, run, settings

N_SEEDS = int(os.environ.get("DISTCA_CHAOS_SEEDS", "3"))
STEPS = 60


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, N_SEEDS + 1))
def test_no_standstill_is_longer_than_promised(
    tmp_path: Path, references: References, seed: int
) -> None:
    schedule = SCHEDULES["random"](random.Random(seed), STEPS)
    outcome = run(schedule, settings(STEPS), references, tmp_path / "run")
    print("\n".join(line for each in outcome.standstills for line in outcome.describe(each)))
    assert outcome.longest_own_seconds <= BOUND_SECONDS
