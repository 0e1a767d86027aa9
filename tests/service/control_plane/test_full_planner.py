"""Plans under the full mask: valid, even, and no more bytes than they say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from control_plane.planner import full
from control_plane.planner.balanced import plan as balanced
from control_plane.planner.planning import PlanningOptions, PlanningServer, equal_servers
from core_attention.ca_task import MaskKind, Phase
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import PlanServer
from core_attention.routing import derive_routes
from core_attention.shape import parse_shape
from tests.support.planning_cases import uniform_profile

SHAPE = replace(parse_shape("8:2:64:bfloat16"), mask=MaskKind.FULL)
PROFILE = uniform_profile(shape=SHAPE, backward=3.0)
OPTIONS = PlanningOptions(min_forward_tokens=128, min_backward_tokens=256)


def merged(*by_rank: list[list[int]]) -> Manifest:
    manifests = [RankManifest.from_lengths(0, rank, nano) for rank, nano in enumerate(by_rank)]
    return Manifest.merge(manifests, len(manifests))


def test_the_longest_documents_are_cut_until_servers_are_target_load() -> None:
    manifest = merged([[32768], [100]], [[8192] * 4, [100]], [[2048] * 16, [40]])
    plan = balanced(manifest, equal_servers(3, PROFILE), SHAPE, OPTIONS)
    assert plan.mask is plan.forward.mask is MaskKind.FULL
    for phase in Phase:
        forecast = plan.forecast(phase)
        assert forecast is not None
        work = (
            1e-9
            * (1 if phase is Phase.FORWARD else 3)
            * sum(length * length for length in (32768, *[8192] * 4, *[2048] * 16))
        )
        assert forecast.seconds[0].sum() == pytest.approx(work)
        assert forecast.seconds[0].max() <= (1 + OPTIONS.tolerance) * work / 3
        tasks = plan.tasks(phase)
        shortest = 128 if phase is Phase.FORWARD else 256
        long = np.flatnonzero(manifest.document_length[tasks.document] > 128)
        assert (tasks.q_end - tasks.q_begin)[long].min() >= shortest


def test_a_pool_takes_all_work_and_a_slow_server_less() -> None:
    manifest = merged([[16384, 512]], [[4096]])
    servers = [
        PlanningServer(
            server=PlanServer(f"node-{n}", None, ""), host="pool", profile=PROFILE, speed=speed
        )
        for n, speed in enumerate((1.0, 0.5))
    ]
    forecast = full.plan(manifest, servers, SHAPE, OPTIONS).forward_forecast
    assert forecast is not None
    seconds = forecast.seconds[0]
    assert seconds.max() <= (1 + OPTIONS.tolerance) * (seconds @ [1.0, 0.5]) / 1.5
    assert forecast.q_rows[0, 0] > forecast.q_rows[0, 1]


@given(
    lengths=st.lists(
        st.lists(st.lists(st.integers(1, 3000), max_size=6), min_size=2, max_size=2),
        min_size=2,
        max_size=3,
    ),
    spans=st.booleans(),
)
def test_plans_are_valid_and_count_the_bytes_of_their_routes(
    lengths: list[list[list[int]]], spans: bool
) -> None:
    assume(spans or any(nano for rank in lengths for nano in rank))
    manifests = [RankManifest.from_lengths(0, rank, nano) for rank, nano in enumerate(lengths)]
    if spans:
        for rank, whole in enumerate(manifests):
            cut = Segment(1 << 40, 500 * len(manifests), 500 * rank, 500)
            first = (*whole.nano_batches[0], cut)
            manifests[rank] = RankManifest(0, rank, (first, *whole.nano_batches[1:]))
    manifest = Manifest.merge(manifests, len(manifests))
    servers = equal_servers(len(manifests), PROFILE)
    plan = full.plan(manifest, servers, SHAPE, OPTIONS)
    again = full.plan(manifest, servers, SHAPE, OPTIONS)
    for phase in Phase:
        forecast, tasks = plan.forecast(phase), plan.tasks(phase)
        assert forecast is not None
        assert tasks.server.tolist() == again.tasks(phase).server.tolist()
        pairs = tasks.qk_pairs(manifest).sum()
        assert pairs == (manifest.document_length**2).sum()
        for nano in range(2):
            for (rank, server), route in derive_routes(manifest, tasks, nano).items():
                assert route.n_kv_rows <= forecast.kv_rows[nano, server]
                assert rank != server or route.n_q_rows <= forecast.q_rows[nano, server]


def test_what_the_full_mask_does_not_have_is_refused() -> None:
    manifest, servers = merged([[4096]], [[8]]), equal_servers(2, PROFILE)
    stopped = [replace(server, receives=False, speed=0.0) for server in servers]
    between = RankManifest(0, 0, [[Segment(7, 20, 0, 10)], [Segment(7, 20, 10, 10)]])
    with pytest.raises(PlanError):
        full.plan(manifest, stopped, SHAPE, OPTIONS)
    with pytest.raises(PlanError):
        balanced(Manifest.merge([between], 1), equal_servers(1, PROFILE), SHAPE, PlanningOptions())
