"""Planned homes in the simulator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions
from core_attention.errors import PlanError
from distca.apps.simulator.disaggregated import Method, disaggregated_step
from distca.apps.simulator.homes import planned_homes
from distca.apps.simulator.model import PRESETS
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import K, documents, setup

OPTIONS = PlanningOptions()


@pytest.mark.parametrize("n_nano_batches", [1, 2])
def test_planned_homes_wait_less_for_links(n_nano_batches: int) -> None:
    of = setup(16, profile=PROFILE, tokens_per_rank=128 * K, model=PRESETS["llama-3-8b"])
    packed = Method(planner=balanced.plan, options=OPTIONS, n_nano_batches=n_nano_batches)
    planned = replace(packed, pack=planned_homes(of.rank_profile, OPTIONS))
    batches = [documents(of, seed) for seed in range(4)]
    steps = {
        name: [disaggregated_step(of, batch, method) for batch in batches]
        for name, method in (("packed", packed), ("planned", planned))
    }
    waits = {name: sum(step.exposed_seconds for step in own) for name, own in steps.items()}
    seconds = {name: sum(step.seconds for step in own) for name, own in steps.items()}
    assert waits["planned"] < waits["packed"]
    assert seconds["planned"] < seconds["packed"]
    if n_nano_batches == 1:  # where a nano-batch holds any document, fewer bytes move besides
        moved = {name: sum(step.moved_bytes for step in own) for name, own in steps.items()}
        assert moved["planned"] < moved["packed"]


def test_tokens_must_match() -> None:
    of = setup(4)
    pack = planned_homes(of.rank_profile, OPTIONS)
    with pytest.raises(PlanError):
        pack(documents(of), 3, of.tokens_per_rank, 1)
