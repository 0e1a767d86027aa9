"""The planner keeps its promise on kinds of steps that nobody chose, or a bound says why not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest
from core_attention.plan import Plan, PlanVerdict
from tests.service.control_plane.oracles.kinds import (
    LADDER,
    PROMISE,
    Kind,
    dominated,
    draw_kind,
    misses_of,
    plan_of,
)
from tests.service.control_plane.oracles.makespan_bound import MakespanBound
from tests.service.control_plane.planner.small_plans import manifest_of
from tests.support.planning_cases import (
    PROFILE,
    in_place,
    pool,
    stream_manifest,
    uniform_profile,
)

K = 1024


def kind_of(
    manifest: Manifest, servers: list[PlanningServer] | None = None, tolerance: float = 0.03
) -> Kind:
    servers = servers or in_place(manifest.n_ranks)
    return Kind(name="a test", tolerance=tolerance, manifest=manifest, servers=servers)


def worst_imbalance(plan: Plan) -> float:
    return max(plan.predicted_imbalance(phase) or 0.0 for phase in Phase)


@pytest.mark.parametrize("first", range(0, 40, 10))
def test_random_kinds_keep_the_promise_or_no_plan_can(first: int) -> None:
    for seed in range(first, first + 10):
        kind = draw_kind(seed, PROFILE, most_servers=128)
        assert not [
            str(m) for m in misses_of(kind, plan_of(kind, kind.tolerance)) if not m.is_proven
        ]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(131, id="giants that fit into no room of slow servers"),
        pytest.param(359, id="one document each, and one slow server"),
        pytest.param(390, id="what a cut has left ends a list of documents"),
        pytest.param(422, id="giants cut at ranks, half of the servers slow"),
        pytest.param(852, id="documents passed over while rooms were narrow"),
        pytest.param(17, id="an end of 61 tokens on a slow server"),
        pytest.param(938, id="a giant whose last queries take longer than the target load"),
        pytest.param(163, id="a giant whose end lies between two cuts"),
        pytest.param(863, id="long pieces instead of many short ones"),
    ],
)
def test_hard_kinds_keep_the_promise_or_no_plan_can(seed: int) -> None:
    kind = draw_kind(seed, PROFILE)
    plan = plan_of(kind, kind.tolerance)
    assert not [str(miss) for miss in misses_of(kind, plan) if not miss.is_proven]
    replace(plan, tasks_are_valid=False)  # which looks at all tasks
    again = plan_of(kind, kind.tolerance)
    for phase in Phase:
        for column in ("document", "q_begin", "q_end", "server"):
            ours, theirs = getattr(plan.tasks(phase), column), getattr(again.tasks(phase), column)
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("tolerance", [0.02, 0.04, 0.1])
def test_a_rare_giant_over_many_ranks(tolerance: float) -> None:
    """Rooms are narrow next to what a thousand of its queries take."""
    lengths = [340_000] + [2_000] * ((512 * 64 * K - 340_000) // 2_000)
    plan = plan_of(kind_of(stream_manifest(lengths, 512, span=True)), tolerance)
    assert worst_imbalance(plan) <= 1 + tolerance + PROMISE
    assert plan.verdict is PlanVerdict.KEPT


@pytest.mark.parametrize("n", [8, 64])
def test_short_documents_on_servers_of_different_speed(n: int) -> None:
    servers = [replace(s, speed=0.5 if i % 2 else 1.0) for i, s in enumerate(in_place(n))]
    manifest = stream_manifest([1024] * (n * 128), n)
    plan = plan_of(kind_of(manifest, servers), 0.03)
    assert worst_imbalance(plan) <= 1.05
    # A third of what the slow half holds must leave it.
    for forecast in (plan.forward_forecast, plan.backward_forecast):
        assert forecast is not None
        assert forecast.q_rows[0, ::2].sum() == pytest.approx(2 / 3 * n * 128 * K, rel=0.03)


@pytest.mark.parametrize(
    ("n_ranks", "n_servers", "tokens"), [(2, 3, 2 * K), (4, 3, 2 * K), (3, 8, 8 * K)]
)
def test_a_pool_gets_the_ends_of_documents_that_span_ranks(
    n_ranks: int, n_servers: int, tokens: int
) -> None:
    """These ends are too short to be cut again, and take longer than most rooms are wide."""
    generator = np.random.default_rng(n_servers)
    options = PlanningOptions(tolerance=0.03, min_backward_tokens=128)
    for _ in range(40):
        drawn = np.exp(generator.normal(np.log(tokens / 4), 1.0, 64)).astype(int) + 1
        lengths = np.minimum(drawn, n_ranks * tokens)
        kept = lengths[: np.searchsorted(np.cumsum(lengths), n_ranks * tokens) + 1]
        kept[-1] -= kept.sum() - n_ranks * tokens
        servers = [
            replace(server, speed=float(generator.uniform(0.7, 1.0)))
            for server in pool(n_servers, profile=uniform_profile())
        ]
        manifest = stream_manifest([int(n) for n in kept], n_ranks, span=True)
        plan = balanced.plan(manifest, servers, servers[0].profile.shape, options)
        assert plan.verdict is PlanVerdict.KEPT, plan.reason


@pytest.mark.parametrize("tolerance", [0.02, 0.1])
def test_one_long_document_among_tiny_ones(tolerance: float) -> None:
    lengths = [128 * K] + [64] * (256 * 16 * K // 64)
    plan = plan_of(kind_of(stream_manifest(lengths, 256, span=True)), tolerance)
    assert worst_imbalance(plan) <= 1 + tolerance + PROMISE


def test_a_document_whose_last_queries_take_longer_than_the_target_load_is_told() -> None:
    manifest = stream_manifest([64 * K] + [16] * 4096, 1024, span=True)
    kind = kind_of(manifest, tolerance=0.02)
    plan = plan_of(kind, kind.tolerance)
    misses = misses_of(kind, plan)
    assert misses
    assert plan.verdict is PlanVerdict.INDIVISIBLE


def test_a_step_that_no_plan_divides_is_a_miss() -> None:
    """Four servers, six documents that are too short to be cut."""
    plan = plan_of(kind_of(manifest_of([[60, 60, 60], [60], [60], [60]])), 0.05)
    assert plan.verdict is PlanVerdict.MISSED


def test_a_plan_that_moves_nothing_is_not_undercut_by_one_that_moves_something() -> None:
    lengths = [16 * K] * 3 + [18 * K]
    kind = kind_of(stream_manifest(lengths, 2, span=False))
    assert plan_of(kind, LADDER[-1]).verdict is PlanVerdict.KEPT
    assert not [line for line in dominated(kind) if f"at {LADDER[-1]:g} by" in line]


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(18, id="giants that splitting divides with half of the bytes"),
        pytest.param(36, id="few documents over four ranks"),
        pytest.param(48, id="documents alike, half of the servers slow"),
        pytest.param(49, id="a piece that relieves none of those who end last"),
        pytest.param(67, id="one chunk more or less"),
        pytest.param(75, id="five segments on four servers"),
        pytest.param(127, id="four pieces where two do"),
    ],
)
def test_no_tolerance_has_a_plan_that_another_one_undercuts(seed: int) -> None:
    assert not dominated(draw_kind(seed, PROFILE, most_servers=128))


class TestBound:
    def test_with_a_kernel_of_one_rate_it_is_the_mean(self) -> None:
        lengths, speeds = np.array([1000, 3000, 64 * K]), np.array([1.0, 0.5, 0.5])
        bound = MakespanBound(uniform_profile(), Phase.FORWARD, int(lengths.max()))
        pairs = (lengths * (lengths + 1) // 2).sum()
        assert bound.least_seconds(lengths, speeds) == pytest.approx(1e-9 * pairs / 2, rel=1e-4)

    def test_no_query_ends_before_it_can(self) -> None:
        """With servers without number only the last query counts."""
        bound = MakespanBound(PROFILE, Phase.BACKWARD, 64 * K)
        least = bound.least_seconds(np.array([64 * K]), np.ones(10**6))
        first = PROFILE.seconds(np.arange(1, 65), 64 * K, Phase.BACKWARD).min()
        assert least == pytest.approx(float(first), rel=1e-6)

    @pytest.mark.parametrize("seed", range(200, 206))
    def test_no_plan_is_below_it(self, seed: int) -> None:
        kind = draw_kind(seed, PROFILE, most_servers=64)
        plan = plan_of(kind, 0.0)
        lengths = kind.manifest.document_length
        for phase in Phase:
            forecast = plan.forecast(phase)
            assert forecast is not None
            bound = MakespanBound(PROFILE, phase, int(lengths.max()))
            assert bound.least_seconds(lengths, kind.speeds) <= forecast.seconds.max()
