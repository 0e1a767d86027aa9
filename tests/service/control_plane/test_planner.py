"""The balanced planner keeps its promises, whatever the documents and servers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner import Case, draw
from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import PhaseForecast, Plan
from core_attention.routing import derive_routes
from distca.apps.simulator.lengths import sample_lengths
from distca.contract.codec import plan_to_proto
from tests.support.cut_manifests import in_halves
from tests.support.planning_cases import (
    PROFILE,
    SHAPE,
    assert_equal,
    in_place,
    pool,
    stream_manifest,
    uniform_profile,
)

TOKENS = 32 * 1024


def plan_of(
    manifest: Manifest, servers: list[PlanningServer], tolerance: float = 0.03, **options: object
) -> Plan:
    return balanced.plan(
        manifest,
        servers,
        SHAPE,
        PlanningOptions(tolerance=tolerance, **options),  # type: ignore[arg-type]
    )


def forecasts(plan: Plan) -> list[PhaseForecast]:
    assert plan.forward_forecast is not None
    assert plan.backward_forecast is not None
    return [plan.forward_forecast, plan.backward_forecast]


def with_speeds(servers: list[PlanningServer], speeds: list[float]) -> list[PlanningServer]:
    return [
        PlanningServer(server=s.server, host=s.host, profile=s.profile, speed=speed)
        for s, speed in zip(servers, speeds, strict=True)
    ]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40_000), min_size=1, max_size=40),
    n_ranks=st.integers(1, 8),
    n_pool=st.integers(0, 4),
    has_in_place=st.booleans(),
    layout=st.sampled_from(["whole", "span", "cut"]),
    speeds=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0, 10.0]), min_size=12, max_size=12),
    tolerance=st.sampled_from([0.0, 0.02, 0.1, 1.0]),
    n_hosts=st.integers(1, 8),
)
def test_every_plan_is_valid_and_repeatable(
    lengths: list[int],
    n_ranks: int,
    n_pool: int,
    has_in_place: bool,
    layout: str,
    speeds: list[float],
    tolerance: float,
    n_hosts: int,
) -> None:
    n_ranks = min(n_ranks, sum(lengths))
    manifest = stream_manifest(lengths, n_ranks, span=layout == "span")
    if layout == "cut" and sum(lengths) >= 2 * n_ranks:
        manifest = Manifest.merge(in_halves(n_ranks, *lengths), n_ranks)
    servers = in_place(n_ranks, servers_per_host=n_hosts) if has_in_place or not n_pool else []
    servers = [*servers, *pool(n_pool)]
    speeds[len(servers) - 1] = 1.0
    servers = with_speeds(servers, speeds[: len(servers)])
    # The constructor of Plan checks that tasks partition documents and lie in one segment.
    first, second = plan_of(manifest, servers, tolerance), plan_of(manifest, servers, tolerance)
    assert_equal(first, second)
    # Neighbours on one server are one task of one segment.
    ends = set(manifest.segment_offset + manifest.segment_length)
    for tasks in (first.forward, first.backward):
        same = (np.diff(tasks.document) == 0) & (np.diff(tasks.server) == 0)
        assert set(tasks.q_begin[1:][same].tolist()) <= ends
    for forecast in forecasts(first):
        assert np.isfinite(forecast.seconds).all()
        stopped = np.array([server.speed == 0 for server in servers])
        assert (forecast.q_rows[:, stopped] == 0).all()


@pytest.mark.parametrize("n_nano_batches", [1, 2])
@pytest.mark.parametrize("tolerance", [0.02, 0.1])
@pytest.mark.parametrize("n", [2, 4, 8, 32])
@pytest.mark.parametrize("name", ["pretrain", "prolong"])
def test_the_busiest_server_keeps_the_tolerance(
    name: str, n: int, tolerance: float, n_nano_batches: int
) -> None:
    for seed in range(3):
        tokens = 2 * TOKENS * n_nano_batches
        lengths = sample_lengths(name, n * tokens, tokens // n_nano_batches, seed)
        manifest = stream_manifest(lengths.tolist(), n, n_nano_batches=n_nano_batches)
        for forecast in forecasts(plan_of(manifest, in_place(n), tolerance)):
            assert forecast.predicted_imbalance <= 1 + tolerance + 0.02


@pytest.mark.parametrize("n", [2, 8])
def test_a_document_over_both_nano_batches_keeps_the_tolerance(n: int) -> None:
    for lengths in ([n * 2 * TOKENS], [n * TOKENS, *[TOKENS // 2] * (2 * n)]):
        manifest = Manifest.merge(in_halves(n, *lengths), n)
        for forecast in forecasts(plan_of(manifest, in_place(n))):
            assert forecast.predicted_imbalance <= 1.05
            # The second half of a document has three times the work of the first.
            if len(lengths) == 1:
                first, second = forecast.seconds.sum(axis=1)
                assert 2.8 * first < second < 3.2 * first


def test_pieces_get_shorter_where_the_tolerance_cannot_be_kept_otherwise() -> None:
    # 512 queries at the end of a document of 512K take a tenth of the mean load.
    case = Case(name="prolong", tokens=64 * 1024, longest=512 * 1024, n=512, seeds=1)
    forecast = forecasts(plan_of(draw(case, 4), in_place(case.n), 0.02))[1]
    assert PROFILE.seconds(512, case.longest, Phase.BACKWARD) > 0.09 * forecast.seconds.mean()
    assert forecast.home_imbalance > 30
    assert forecast.predicted_imbalance <= 1.04


def drawn(seed: int) -> Manifest:
    lengths = sample_lengths("pretrain", 8 * 2 * TOKENS, 2 * TOKENS, seed)
    return stream_manifest(lengths.tolist(), 8)


SLOW = uniform_profile(4 * float(PROFILE.seconds(4096, 8192, Phase.FORWARD)) / 25e6)


@pytest.mark.parametrize(
    ("manifest", "servers"),
    [
        pytest.param(drawn(3), pool(8), id="a pool"),
        pytest.param(drawn(3), in_place(5) + pool(3), id="mixed"),
        pytest.param(drawn(6), in_place(4) + in_place(8, profile=SLOW)[4:], id="different devices"),
        pytest.param(
            stream_manifest([4 << 20], 64, span=True), in_place(64), id="four million tokens"
        ),
        pytest.param(
            stream_manifest(np.random.default_rng(0).integers(1, 64, size=100_000).tolist(), 16),
            in_place(16),
            id="a hundred thousand tiny documents",
        ),
    ],
)
def test_servers_of_any_kind_finish_together(
    manifest: Manifest, servers: list[PlanningServer]
) -> None:
    for forecast in forecasts(plan_of(manifest, servers)):
        assert forecast.predicted_imbalance <= 1.05
        # Ranks read the early keys for their own tasks anyway; moved queries bring few more.
        assert forecast.kv_rows.max() <= manifest.document_length.sum()


def test_a_larger_tolerance_moves_no_more_bytes_in_the_mean() -> None:
    moved = []
    for tolerance in (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0):
        total = 0
        for seed in range(12):
            lengths = sample_lengths("pretrain", 8 * 2 * TOKENS, 2 * TOKENS, seed)
            plan = plan_of(stream_manifest(lengths.tolist(), 8), in_place(8), tolerance)
            total += sum(int(f.bytes_in.sum() + f.bytes_out.sum()) for f in forecasts(plan))
        moved.append(total)
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 0.2 * moved[0]


def test_backward_pieces_are_long() -> None:
    lengths = sample_lengths("prolong", 16 * 4 * TOKENS, 4 * TOKENS, 2)
    manifest = stream_manifest(lengths.tolist(), 16)
    tasks = plan_of(manifest, in_place(16)).backward
    cut = tasks.q_end - tasks.q_begin < manifest.document_length[tasks.document]
    assert cut.any()
    assert (tasks.q_end - tasks.q_begin)[cut].min() >= 512
    at_home = (
        tasks.server
        == manifest.segment_rank[np.searchsorted(manifest.segment_document, tasks.document)]
    )
    assert (tasks.q_end - tasks.q_begin)[cut & ~at_home].min() >= 1024


def test_nothing_moves_when_all_is_even() -> None:
    plan = plan_of(stream_manifest([8192] * 4, 4), in_place(4))
    assert all(forecast.bytes_in.sum() == 0 for forecast in forecasts(plan))
    assert "nothing moves" in plan.reason


def test_one_token() -> None:
    for servers in (in_place(1), pool(1), in_place(1, receives=False)):
        plan = plan_of(stream_manifest([1], 1), servers)
        assert len(plan.forward) == len(plan.backward) == 1


def test_phases_planned_side_by_side_are_those_planned_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest = stream_manifest([9_000, *[150] * balanced.WORTH_A_THREAD], 8)
    servers, options = in_place(8), PlanningOptions(tolerance=0.02)
    plan = balanced.plan(manifest, servers, SHAPE, options)
    monkeypatch.setattr(balanced, "WORTH_A_THREAD", manifest.n_segments + 1)
    in_turn = balanced.plan(manifest, servers, SHAPE, options)
    assert plan_to_proto(plan, "job") == plan_to_proto(in_turn, "job")
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.bytes_in.any()


def test_a_server_that_does_not_receive_keeps_only_its_own() -> None:
    manifest = stream_manifest([2 * TOKENS] + [256] * (6 * TOKENS // 256), 4)
    servers = in_place(4)
    servers[2] = PlanningServer(
        server=servers[2].server, host="host-2", profile=PROFILE, receives=False
    )
    for forecast in forecasts(plan_of(manifest, servers)):
        assert forecast.bytes_in[0, 2] == 0
        # Two servers and the sender share what the fourth may not take.
        others = np.delete(forecast.seconds[0], 2)
        assert others.max() <= 1.05 * others.mean()


def test_work_moves_inside_a_host_where_that_is_enough() -> None:
    # Two hosts, each with one full and one nearly empty rank.
    long, short = [2 * TOKENS], [256] * (2 * TOKENS // 256)
    manifest = stream_manifest(long + short + long + short, 4)
    servers = in_place(4, servers_per_host=2)
    for phase in Phase:
        pairs = derive_routes(manifest, plan_of(manifest, servers).tasks(phase), 0).keys()
        assert (0, 1) in pairs
        assert all(rank // 2 == server // 2 for rank, server in pairs)


def test_rank_hosts_name_the_hosts_of_ranks_without_a_server() -> None:
    manifest = stream_manifest([TOKENS] * 2, 2)
    servers = pool(2)
    plan = plan_of(manifest, servers, rank_hosts=("pool-1", "pool-0"))
    assert {int(s) for s in plan.forward.server} == {0, 1}
    with pytest.raises(PlanError):
        plan_of(manifest, servers, rank_hosts=("a",))


def test_documents_that_span_ranks_use_the_keys_that_are_there() -> None:
    # Rank 1 fetches all keys of the document for its own tail; taking over its middle is cheap.
    manifest = Manifest.merge(
        [
            RankManifest(0, 0, ((Segment(0, 3 * TOKENS, 0, 2 * TOKENS),),)),
            RankManifest(0, 1, ((Segment(0, 3 * TOKENS, 2 * TOKENS, TOKENS),),)),
            RankManifest(0, 2, ((Segment(1, TOKENS, 0, TOKENS),),)),
        ],
        3,
    )
    plan = plan_of(manifest, in_place(3), tolerance=0.5)
    assert plan.forward_forecast is not None
    assert plan.forward_forecast.predicted_imbalance <= 1.52


@pytest.mark.parametrize("servers", [in_place(4), pool(4), in_place(2) + pool(2)])
def test_planning_keeps_no_memory(servers: list[PlanningServer]) -> None:
    # Compiled code counts references to its arrays by hand; one too many keeps the array for ever.
    manifest = stream_manifest([TOKENS] + [1000] * 64, 4)
    runtime: Any = importlib.import_module("numba.core.runtime.nrt")
    runtime._nrt.memsys_enable_stats()
    kept = []
    for _ in range(3):
        plan_of(manifest, servers)
        stats = runtime.rtsys.get_allocation_stats()
        kept.append(stats.mi_alloc - stats.mi_free)
    assert kept[1] == kept[2]


class TestMemory:
    def rows(self, plan: Plan) -> Int64Array:
        rows: Int64Array = np.stack([(f.q_rows + f.kv_rows).max(axis=0) for f in forecasts(plan)])
        return np.asarray(rows.max(axis=0))

    @pytest.mark.parametrize("kind", ["in place", "pool"])
    @pytest.mark.parametrize("capacity", [2.4, 3.0, 6.0])
    def test_no_server_gets_more_rows_than_it_holds(self, kind: str, capacity: float) -> None:
        lengths = sample_lengths("pretrain", 8 * 2 * TOKENS, TOKENS, 7)
        manifest = stream_manifest(lengths.tolist(), 8)
        rows = int(capacity * 2 * TOKENS)
        servers = (
            in_place(8, capacity_rows=rows) if kind == "in place" else pool(8, capacity_rows=rows)
        )
        plan = plan_of(manifest, servers)
        assert (self.rows(plan) <= rows).all()

    def test_a_rank_with_too_little_memory_gives_documents_away(self) -> None:
        manifest = stream_manifest([4096] * 16, 4)
        servers = in_place(1, capacity_rows=16_000) + in_place(4)[1:]
        plan = plan_of(manifest, servers)
        assert self.rows(plan)[0] <= 16_000

    @pytest.mark.parametrize(
        ("lengths", "servers"),
        [
            ([4096] * 8, pool(2, capacity_rows=15_000)),
            ([TOKENS], pool(2, capacity_rows=20_000)),
            ([4096] * 4, in_place(2, capacity_rows=10_000)),
        ],
        ids=["a pool", "the longest document", "an own server"],
    )
    def test_what_does_not_fit_is_an_error(
        self, lengths: list[int], servers: list[PlanningServer]
    ) -> None:
        manifest = stream_manifest(lengths, 2 if len(lengths) > 1 else 1)
        with pytest.raises(PlanError):
            plan_of(manifest, servers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tolerance", -0.1),
        ("tolerance", float("nan")),
        ("tolerance", "low"),
        ("network_bytes_per_second", 0.0),
        ("host_bytes_per_second", None),
        ("min_backward_tokens", 0),
    ],
)
def test_bad_options_are_refused(name: str, value: Any) -> None:
    with pytest.raises(PlanError):
        PlanningOptions(**{name: value})


@pytest.mark.parametrize(
    "servers", [[], in_place(3), in_place(1) + in_place(1), in_place(1, receives=False)]
)
def test_bad_fleets_are_refused(servers: list[PlanningServer]) -> None:
    with pytest.raises(PlanError):
        plan_of(stream_manifest([100, 100], 2), servers)
