"""Jobs whose ranks form pipelines: what is refused, how they are planned, what is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from control_plane.planner.planners import PLANNERS
from control_plane.server import ControlPlane
from core_attention.pipelining import Pipelining
from core_attention.plan import SlotForecast
from core_attention.schedule_orders import SCHEDULES
from distca.contract import rpc
from distca.contract.codec import (
    MAX_SCHEDULE_BYTES,
    WireError,
    pipelining_from_proto,
    pipelining_to_proto,
    plan_from_proto,
)
from distca.v1 import jobs_pb2
from tests.support.errors import fails
from tests.support.service_harness import Client, client_of, job_spec, rank_manifest, running

COMPILE_SECONDS = 300.0
"""Planners compile on first use: tens of seconds on a loaded machine without numba's cache."""


LENGTHS = [[5, 7], [12]]
"""Of documents, the same in all stages."""


def pipelining(name: str = "1f1b", n_microbatches: int = 2) -> Pipelining:
    return Pipelining(
        schedule=SCHEDULES[name](2, n_microbatches),
        pipeline_ranks=(0, 1),
        layers=(4, 4),
        forward_seconds=(1e-6, 2e-6),
        backward_seconds=(2e-6, 4e-6),
    )


def changed(change: Callable[[jobs_pb2.Pipelining], object]) -> jobs_pb2.Pipelining:
    message = pipelining_to_proto(pipelining())
    change(message)
    return message


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with running(
        PLANNERS, coordinator={"default_planner": "balanced"}, start_seconds=COMPILE_SECONDS
    ) as control_plane:
        with client_of(control_plane.address) as client:
            client.register("node-1")
        yield control_plane


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_wire_keeps_pipelines(name: str) -> None:
    schedule = SCHEDULES[name](3, 6)
    given = Pipelining(
        schedule=schedule,
        pipeline_ranks=(0, 1, 2, 2, 1, 0),
        layers=tuple(range(1, schedule.n_stages + 1)),
        forward_seconds=tuple(1e-6 / (n + 3) for n in range(schedule.n_stages)),
        backward_seconds=tuple(2e-6 / (n + 3) for n in range(schedule.n_stages)),
    )
    assert pipelining_from_proto(pipelining_to_proto(given)) == given


@pytest.mark.parametrize(
    "message",
    [
        changed(lambda m: m.ClearField("schedule_csv")),
        changed(lambda m: setattr(m, "schedule_csv", "x" * (MAX_SCHEDULE_BYTES + 1))),
        changed(lambda m: setattr(m, "schedule_csv", "4000000000F0,4000000000B0")),
        changed(lambda m: setattr(m, "schedule_csv", "0F4000000000,0B0")),
        changed(lambda m: m.layers.append(1)),
    ],
)
def test_malformed_pipelines_are_refused(message: jobs_pb2.Pipelining) -> None:
    with pytest.raises(WireError):
        pipelining_from_proto(message)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_ranks": 4},
        {"n_layers": 3},
        {"n_nano_batches": 3},
        {"pipelining": changed(lambda m: m.layers.pop())},
    ],
)
def test_jobs_that_do_not_fit_their_pipelines_are_refused(
    client: Client, changes: dict[str, Any]
) -> None:
    message = pipelining_to_proto(pipelining())
    with fails(rpc.Reason.INVALID_REQUEST):
        client.open(0, job_spec(**{"pipelining": message, **changes}))


def test_a_step_of_pipelines_is_planned_by_slots(client: Client) -> None:
    spec = job_spec("planned", pipelining=pipelining_to_proto(pipelining()))
    (job, first), (_, second) = (client.open(rank, spec) for rank in (0, 1))
    watcher = client.watch_rank(job, first)
    watcher.next("job_opened")
    for rank, lease in enumerate((first, second)):
        client.submit(job, lease, rank_manifest(0, rank, LENGTHS))
    plan = plan_from_proto(watcher.next("step_planned").plan)
    assert "slots of 1f1b of 2 stages on 2 ranks and 2 microbatches" in plan.reason
    client.close_job(job, first, "over")


def test_what_servers_measure_is_spread_over_slots_as_expected() -> None:
    base = np.array([[[4.0, 0.0], [0.0, 0.0]]])
    attention = np.array([[[0.0, 4.0], [2.0, 2.0]]])
    slots = SlotForecast(home_seconds=base + attention, base_seconds=base, seconds=base + attention)
    assert slots.level_seconds.tolist() == [[4.0, 2.0]]
    assert slots.imbalance.tolist() == [1.0, 1.0]
    assert slots.measured_imbalance(np.array([2.0, 6.0])) == pytest.approx(1.0)
    # The second server takes 1.5 times as long: 6 s in the first slot, whose target load is 5 then.
    assert slots.measured_imbalance(np.array([2.0, 9.0])) == pytest.approx(1.2)
    nothing = np.zeros_like(base)
    idle = SlotForecast(home_seconds=nothing, base_seconds=nothing, seconds=nothing)
    assert idle.measured_imbalance(np.zeros(2)) == 1.0
