"""Random schedules of faults: three here and one with whole documents, many each night. With
``DISTCA_CHAOS_SCHEDULES`` those that it names."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.cluster.chaos.scenario import References
from tests.cluster.chaos.schedules import SCHEDULES
from tests.cluster.chaos.standstills import run, settings

N_SEEDS = int(os.environ.get("DISTCA_CHAOS_SEEDS", "3"))
NAMES = os.environ.get("DISTCA_CHAOS_SCHEDULES", "random away").split()
STEPS = 60


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        (name, seed)
        for name in NAMES
        for seed in range(1, (N_SEEDS if name == "random" else N_SEEDS // 3) + 1)
    ],
)
def test_no_standstill_is_longer_than_promised(
    tmp_path: Path, references: References, name: str, seed: int
) -> None:
    schedule = SCHEDULES[name](random.Random(seed), STEPS)
    chosen = settings(STEPS, apart=schedule.apart)
    outcome = run(schedule, chosen, references, tmp_path / "run")
    print("\n".join(line for each in outcome.standstills for line in outcome.describe(each)))
    assert not outcome.is_too_long
