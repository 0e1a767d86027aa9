"""Forecasts against the routes that trainers and servers really exchange."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.forecast import forecast, row_bytes
from control_plane.planner.planning import PlanningOptions
from core_attention.ca_task import Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest
from core_attention.message import reply_layout, request_layout
from core_attention.routing import derive_routes
from tests.support import random_planner
from tests.support.cut_manifests import in_halves
from tests.support.planning_cases import PROFILE, SHAPE, in_place, pool, stream_manifest

LENGTHS = [9000, 300, 5, 4000, 12000, 700, 1, 2500]
CASES = {
    "in place": (stream_manifest(LENGTHS, 4), in_place(4)),
    "spanning ranks": (stream_manifest(LENGTHS, 4, span=True), in_place(4)),
    "pool": (stream_manifest(LENGTHS, 4, span=True), pool(3)),
    "mixed": (stream_manifest(LENGTHS, 4), in_place(3) + pool(2)),
    "cut between nano-batches": (Manifest.merge(in_halves(3, *LENGTHS), 3), in_place(3)),
    "cut, pool": (Manifest.merge(in_halves(2, *LENGTHS), 2), pool(3)),
    "two nano-batches": (stream_manifest(LENGTHS, 2, n_nano_batches=2), in_place(2)),
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_the_messages(case: str, phase: Phase) -> None:
    manifest, servers = CASES[case]
    plan = balanced.plan(manifest, servers, SHAPE, PlanningOptions())
    tasks = plan.tasks(phase)
    predicted = plan.forecast(phase)
    assert predicted is not None
    per_row = row_bytes(SHAPE, phase)
    for nano_batch in range(manifest.n_nano_batches):
        request = np.zeros((manifest.n_ranks, len(servers)), dtype=np.int64)
        reply = np.zeros_like(request)
        for (rank, server), route in derive_routes(manifest, tasks, nano_batch).items():
            if servers[server].server.in_place_rank == rank:
                continue
            request[rank, server] = (
                route.n_q_rows * per_row.q_request + route.n_kv_rows * per_row.kv_request
            )
            reply[rank, server] = (
                route.n_q_rows * per_row.q_reply + route.n_kv_rows * per_row.kv_reply
            )
            # What is left out of a message is the padding between its six sections at most.
            padding = request_layout(route, SHAPE, phase).nbytes - request[rank, server]
            assert 0 <= padding < 6 * 256
            assert 0 <= reply_layout(route, SHAPE, phase).nbytes - reply[rank, server] < 6 * 256
        np.testing.assert_array_equal(predicted.bytes_in[nano_batch], request.sum(axis=0))
        np.testing.assert_array_equal(predicted.bytes_out[nano_batch], reply.sum(axis=0))


@pytest.mark.parametrize("case", CASES)
def test_seconds_are_the_profiles(case: str) -> None:
    manifest, servers = CASES[case]
    plan = balanced.plan(manifest, servers, SHAPE, PlanningOptions())
    for phase in Phase:
        tasks = plan.tasks(phase)
        seconds = PROFILE.seconds(tasks.q_end - tasks.q_begin, tasks.q_end, phase)
        expected = np.zeros((manifest.n_nano_batches, len(servers)))
        np.add.at(expected, (manifest.document_nano_batch[tasks.document], tasks.server), seconds)
        predicted = plan.forecast(phase)
        assert predicted is not None
        # Sums of the same float64 terms in another order.
        np.testing.assert_allclose(predicted.seconds, expected, rtol=1e-12)
        assert predicted.q_rows.sum() == manifest.segment_length.sum()


def test_a_slower_server_takes_longer() -> None:
    manifest = stream_manifest([4096, 4096], 2)
    tasks = balanced.plan(manifest, in_place(2), SHAPE, PlanningOptions()).forward
    full = forecast(manifest, tasks, in_place(2), SHAPE, Phase.FORWARD)
    half = forecast(manifest, tasks, in_place(2, speed=0.5), SHAPE, Phase.FORWARD)
    np.testing.assert_allclose(half.seconds, 2 * full.seconds, rtol=1e-15)
    np.testing.assert_allclose(half.home_seconds, 2 * full.home_seconds, rtol=1e-15)


def test_home_seconds_of_a_rank_without_a_server_use_the_first_profile() -> None:
    manifest = stream_manifest([4096, 2048], 2)
    tasks = balanced.plan(manifest, pool(2), SHAPE, PlanningOptions()).forward
    predicted = forecast(manifest, tasks, pool(2), SHAPE, Phase.FORWARD)
    lengths = [[3072], [1024, 2048]]
    expected = [PROFILE.seconds(q, q, Phase.FORWARD).sum() for q in lengths]
    np.testing.assert_allclose(predicted.home_seconds, [expected], rtol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_tasks_that_break_an_invariant_have_no_forecast(case: str) -> None:
    """Whatever is changed, taken out or put in: a forecast finds what the check of plans finds."""
    manifest, servers = CASES[case]
    good = random_planner.plan(manifest, servers, SHAPE, PlanningOptions()).forward
    columns = np.stack([good.document, good.q_begin, good.q_end, good.server])
    broken = [columns[:, :0], columns[:, 1:], columns[:, :-1], columns[:, ::-1]]
    for at in range(len(good)):
        broken += [np.delete(columns, at, axis=1), np.insert(columns, at, columns[:, at], axis=1)]
        for column in range(4):
            for change in (-1, 1, 1000):
                broken.append(columns.copy())
                broken[-1][column, at] += change
    n_refused = 0
    for table in (TaskTable(*each) for each in broken):
        said = _refusal(partial(table.check, manifest, len(servers)))
        predict = partial(forecast, manifest, table, servers, SHAPE, Phase.FORWARD)
        assert _refusal(predict) == said
        n_refused += said is not None
    assert n_refused > len(broken) / 2


def _refusal(action: Callable[[], object]) -> str | None:
    """What the PlanError of ``action`` says; None if there is none."""
    try:
        action()
    except PlanError as error:
        return str(error)
    return None
