"""Plans that leave documents where they are: valid, with forecasts like the planner's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from control_plane.planner import at_home
from control_plane.planner.forecast import forecast
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from tests.support.planning_cases import SHAPE, in_place, pool, stream_manifest

LENGTHS = [9000, 200, 5000, 30, 700, 8000, 1, 20_000, 64, 3000]

CASES = {
    "in place": (stream_manifest(LENGTHS, 4), in_place(4)),
    "pool": (stream_manifest(LENGTHS, 2, n_nano_batches=2), pool(3)),
    "mixed, spanning": (stream_manifest(LENGTHS, 3, span=True), in_place(3) + pool(1)),
}


def planned(manifest: Manifest, servers: Sequence[PlanningServer]) -> Plan:
    plan = at_home.plan(manifest, servers, SHAPE, PlanningOptions(), epoch=7, why="it is tried")
    plan.forward.check(manifest, len(servers))
    return plan


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("phase", Phase)
def test_forecasts_are_those_of_the_same_tasks(case: str, phase: Phase) -> None:
    manifest, servers = CASES[case]
    plan = planned(manifest, servers)
    found, expected = (
        plan.forecast(phase),
        forecast(manifest, plan.tasks(phase), servers, SHAPE, phase),
    )
    assert found is not None
    for name in ("home_seconds", "seconds", "q_rows", "kv_rows", "bytes_in", "bytes_out"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), 1e-9, err_msg=name
        )


def test_every_segment_stays_with_its_ranks_own_server() -> None:
    manifest, servers = CASES["mixed, spanning"]
    assert np.array_equal(planned(manifest, servers).forward.server, manifest.segment_rank)


def test_a_pool_is_filled_evenly() -> None:
    manifest = stream_manifest([1000] * 9, 2)
    servers = np.bincount(planned(manifest, pool(3)).forward.server)
    assert servers.max() - servers.min() <= 1


def test_what_no_server_can_take_is_refused() -> None:
    with pytest.raises(PlanError):
        planned(stream_manifest([1000], 1), pool(1, capacity_rows=100))
    with pytest.raises(PlanError):
        planned(stream_manifest([1000], 1), pool(1, receives=False))
