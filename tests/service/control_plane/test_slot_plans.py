"""Idle-aware plans of pipelines: every slot of a schedule is balanced on what its ranks compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.planner import balanced
from control_plane.planner.forecast import forecast
from control_plane.planner.planning import PlanningOptions, PlanningServer
from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.errors import PlanError, ScheduleError
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan, SlotForecast, level_seconds
from core_attention.schedule_orders import SCHEDULES
from tests.support.cut_manifests import cut_in_two
from tests.support.planning_cases import PROFILE, SHAPE, in_place, pool

TOLERANCE = 0.03
K = 1024


def pipelining(
    name: str, n_stages: int, n_microbatches: int, n_pipelines: int = 1, share: float = 1.0
) -> Pipelining:
    """Stages of 2 layers, whose linear part of 32K tokens takes ``share`` times the attention of a
    document of 32K."""
    schedule = SCHEDULES[name](n_stages, n_microbatches)
    length = np.array([32 * K])
    seconds = 2 * share * float(PROFILE.seconds(length, length, Phase.FORWARD)[0]) / (32 * K)
    return Pipelining(
        schedule=schedule,
        pipeline_ranks=tuple(r // n_pipelines for r in range(n_stages * n_pipelines)),
        layers=(2,) * schedule.n_stages,
        forward_seconds=(seconds,) * schedule.n_stages,
        backward_seconds=(2 * seconds,) * schedule.n_stages,
    )


def drawn(
    pipes: Pipelining, tokens: int, seed: int, n_halves: int = 1, *, evenly: bool = True
) -> Manifest:
    """Microbatches of whole documents of drawn lengths, the same on all ranks of a pipeline.

    Args:
        tokens: of each nano-batch.
        evenly: otherwise only the two nano-batches of a microbatch together have ``2 * tokens``:
            it is cut in two between any documents.
    """
    rng = np.random.default_rng(seed)

    def documents(tokens: int) -> list[int]:
        lengths, left = [], tokens
        while left:
            lengths.append(min(left, int(rng.lognormal(8.5, 1.5)) + 1))
            left -= lengths[-1]
        return lengths

    def microbatch() -> list[list[int]]:
        if evenly:
            return [documents(tokens) for _ in range(n_halves)]
        lengths = documents(2 * tokens)
        cut = int(rng.integers(len(lengths))) if len(lengths) > 1 else 1
        return [lengths[:cut], lengths[cut:]]

    of_pipeline = [
        [half for _ in range(pipes.schedule.n_microbatches) for half in microbatch()]
        for _ in range(pipes.n_pipelines)
    ]
    seen = [0] * pipes.schedule.n_ranks
    manifests = []
    for rank, place in enumerate(pipes.pipeline_ranks):
        manifests.append(RankManifest.from_lengths(0, rank, of_pipeline[seen[place]]))
        seen[place] += 1
    return Manifest.merge(manifests, len(manifests))


def cut_manifest(manifest: Manifest, n_microbatches: int) -> Manifest:
    """``manifest`` of one nano-batch a microbatch, each cut in its middle, inside a document."""
    documents, cut = manifest.segment_document, []
    for rank in range(manifest.n_ranks):
        nano_batches: list[list[Segment]] = []
        for i in range(n_microbatches):
            its = (manifest.segment_rank == rank) & (manifest.document_nano_batch[documents] == i)
            lengths = manifest.segment_length[its].tolist()
            nano_batches += cut_in_two(lengths, first_id=(rank * n_microbatches + i) << 32)
        cut.append(RankManifest(0, rank, nano_batches))
    return Manifest.merge(cut, manifest.n_ranks)


def planned(
    manifest: Manifest, servers: Sequence[PlanningServer], pipes: Pipelining
) -> tuple[Plan, SlotForecast]:
    options = PlanningOptions(tolerance=TOLERANCE, pipelining=pipes)
    plan = balanced.plan(manifest, servers, SHAPE, options)
    for phase in Phase:
        plan.tasks(phase).check(manifest, len(servers))
    assert plan.slots is not None
    return plan, plan.slots


def attention_by_hand(plan: Plan, pipes: Pipelining, n_halves: int) -> Float64Array:
    """``[n_halves, n_slots, n_servers]`` seconds of core attention, task by task."""
    manifest = plan.manifest
    rank_of = manifest.segment_rank[manifest.first_segment[:-1]]
    seconds = np.zeros((n_halves, len(pipes.slots), len(plan.servers)))
    for phase in Phase:
        tasks = plan.tasks(phase)
        took = PROFILE.seconds(tasks.q_end - tasks.q_begin, tasks.q_end, phase)
        for document, server, one_layer in zip(tasks.document, tasks.server, took, strict=True):
            microbatch, half = divmod(int(manifest.document_nano_batch[document]), n_halves)
            place = pipes.pipeline_ranks[rank_of[document]]
            for at, slot in enumerate(pipes.slots):
                action = slot[place]
                if action is None or action.microbatch != microbatch:
                    continue
                if action.kind.attention_phase is phase:
                    part = pipes.layers[action.stage] / pipes.kind_slots[action.kind]
                    seconds[half, at, server] += one_layer * part
    return seconds


@settings(max_examples=15, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    n_stages=st.integers(2, 4),
    n_pipelines=st.integers(1, 3),
    n_halves=st.integers(1, 2),
    share=st.sampled_from([0.1, 1.0, 5.0]),
    n_pool=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_the_plan_says_what_each_server_does_in_each_slot(
    name: str, n_stages: int, n_pipelines: int, n_halves: int, share: float, n_pool: int, seed: int
) -> None:
    pipes = pipelining(name, n_stages, 2 * n_stages, n_pipelines, share)
    manifest = drawn(pipes, 8 * K, seed, n_halves)
    servers = [*in_place(manifest.n_ranks), *pool(n_pool)]
    plan, slots = planned(manifest, servers, pipes)
    by_hand = attention_by_hand(plan, pipes, n_halves)
    np.testing.assert_allclose(slots.seconds - slots.base_seconds, by_hand, atol=1e-9)
    for at, slot in enumerate(pipes.slots):
        for rank, place in enumerate(pipes.pipeline_ranks):
            action, base = slot[place], 0.0
            if action is not None:
                per_token = pipes.seconds(action.stage, action.kind)
                base = 8 * K * per_token / pipes.kind_slots[action.kind]
            assert slots.base_seconds[:, at, rank] == pytest.approx(base)
    assert not slots.base_seconds[:, :, manifest.n_ranks :].any()
    assert plan.forward_forecast is not None
    assert plan.backward_forecast is not None
    for phase, told in zip(Phase, (plan.forward_forecast, plan.backward_forecast), strict=True):
        tasks = plan.tasks(phase)
        took = PROFILE.seconds(tasks.q_end - tasks.q_begin, tasks.q_end, phase)
        assert told.seconds.sum() == pytest.approx(took.sum(), rel=1e-6)


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("first", "limited"), [(0, False), (0, True), (1, False)])
def test_stages_of_fewer_layers_or_none_take_less_and_serve_the_others(
    name: str, first: int, limited: bool
) -> None:
    pipes = pipelining(name, 2, 4)
    pipes = replace(pipes, layers=(first, *pipes.layers[1:]))
    manifest = drawn(pipes, 32 * K, 1, 2)
    servers = in_place(2)
    if limited:
        servers = [replace(server, capacity_rows=128 * K) for server in servers]
    plan, slots = planned(manifest, servers, pipes)
    by_hand = attention_by_hand(plan, pipes, 2)
    np.testing.assert_allclose(slots.seconds - slots.base_seconds, by_hand, atol=1e-9)
    assert by_hand[:, :, 0].any()


@pytest.mark.parametrize("name", ["same-phase", "zero-bubble"])
@pytest.mark.parametrize("n_halves", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_where_actions_take_one_slot_each_slot_is_at_its_target_load(
    name: str, n_halves: int, seed: int
) -> None:
    pipes = pipelining(name, 4, 8, 2)
    _, slots = planned(drawn(pipes, 32 * K, seed, n_halves), in_place(8), pipes)
    # 0.04 for the rates of pieces, and because the second plan of a slot takes nothing back of what
    # the first has spread up to its own tolerance.
    assert slots.imbalance.max() <= 1 + TOLERANCE + 0.04
    assert slots.home_imbalance > 1.2 > slots.step_imbalance


@pytest.mark.parametrize("name", ["1f1b", "same-phase", "zero-bubble"])
@pytest.mark.parametrize("seed", range(5))
def test_halves_of_unequal_tokens_are_even_together(name: str, seed: int) -> None:
    """A rank runs both in turns, so what counts is their sum."""
    pipes = pipelining(name, 2, 4, 2, share=3.0)
    manifest = drawn(pipes, 16 * K, seed, 2, evenly=False)
    assert len({int(manifest.tokens_per_rank(k)[0]) for k in range(8)}) > 4
    _, slots = planned(manifest, in_place(4), pipes)
    busy, base = slots.seconds.sum(axis=0), slots.base_seconds.sum(axis=0)
    target_load = level_seconds(base, (busy - base).sum(axis=1))
    # 0.02 for slots next to a change of who idles.
    assert busy.max(axis=1).sum() <= (1 + TOLERANCE + 0.02) * target_load.sum()


@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.parametrize(("n_pipelines", "n_pool"), [(1, 0), (2, 1)])
def test_documents_are_cut_between_the_halves_of_a_microbatch(
    name: str, n_pipelines: int, n_pool: int
) -> None:
    pipes = pipelining(name, 2, 4, n_pipelines)
    manifest = cut_manifest(drawn(pipes, 32 * K, 3), 4)
    assert manifest.n_carried == manifest.n_ranks * 4
    servers = [*in_place(manifest.n_ranks), *pool(n_pool)]
    plan, slots = planned(manifest, servers, pipes)
    by_hand = attention_by_hand(plan, pipes, 2)
    np.testing.assert_allclose(slots.seconds - slots.base_seconds, by_hand, atol=1e-9)
    assert slots.step_imbalance < slots.home_imbalance
    # All stages have equally many layers, so a layer's forecast is that of any job.
    for phase in Phase:
        expected = forecast(manifest, plan.tasks(phase), servers, SHAPE, phase)
        got = plan.forecast(phase)
        assert got is not None
        for field in ("q_rows", "kv_rows", "bytes_in", "bytes_out"):
            np.testing.assert_array_equal(getattr(got, field), getattr(expected, field))
        np.testing.assert_allclose(got.seconds, expected.seconds)


def test_a_document_that_is_cut_lies_in_one_microbatch() -> None:
    pipes = pipelining("1f1b", 2, 2)
    cut = [
        RankManifest(0, rank, [[Segment(rank, 2 * K, 0, K)], [Segment(rank, 2 * K, K, K)]])
        for rank in range(2)
    ]
    refused(Manifest.merge(cut, 2), pipes)
    # The rank that holds its keys runs the microbatch in other slots.
    cut = [
        RankManifest(
            0,
            rank,
            [
                [Segment(7, 2 * K, 0, K)] if rank == 0 else [Segment(8, K, 0, K)],
                [Segment(7, 2 * K, K, K)] if rank == 1 else [Segment(9, K, 0, K)],
                [Segment(10 + rank, K, 0, K)],
                [Segment(20 + rank, K, 0, K)],
            ],
        )
        for rank in range(2)
    ]
    refused(Manifest.merge(cut, 2), pipes)


def test_idle_ranks_take_more_in_1f1b() -> None:
    pipes = pipelining("1f1b", 4, 4)
    manifest = drawn(pipes, 32 * K, 0)
    _, slots = planned(manifest, in_place(4), pipes)
    attention = slots.seconds[0, 0] - slots.base_seconds[0, 0]
    assert slots.base_seconds[0, 0].tolist()[1:] == [0.0, 0.0, 0.0]
    assert attention[0] < attention[1:].sum() / 6  # evenly, it would be a third
    even = balanced.plan(manifest, in_place(4), SHAPE, PlanningOptions(tolerance=TOLERANCE))
    busy = attention_by_hand(even, pipes, 1) + slots.base_seconds
    assert slots.seconds.max(axis=2).sum() < 0.85 * busy.max(axis=2).sum()


def test_a_document_over_two_pipelines_is_planned_once() -> None:
    pipes = pipelining("1f1b", 2, 2, 2)
    manifests = [
        RankManifest(
            0, rank, [[Segment(2 * stage + i, 8 * K, at * 4 * K, 4 * K)] for i in range(2)]
        )
        for rank, stage, at in ((0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1))
    ]
    plan, _ = planned(Manifest.merge(manifests, 4), in_place(4), pipes)
    assert plan.manifest.n_documents == 4


def test_memory_is_counted_by_slot() -> None:
    pipes = pipelining("same-phase", 2, 2)
    manifest = drawn(pipes, 16 * K, 0)
    # In a slot both stages hold 2 x 16K rows, so 40K each is enough for both, and 16K is not.
    plan, _ = planned(manifest, [*in_place(2, capacity_rows=80 * K)], pipes)
    assert len(plan.servers) == 2
    with pytest.raises(PlanError):
        planned(manifest, in_place(2, capacity_rows=16 * K), pipes)
    # A rank's own tasks would fit, but for those that were planned for the same slots before.
    manifest = Manifest.merge(
        [RankManifest.from_lengths(0, rank, [[16 * K]] * 4) for rank in range(2)], 2
    )
    pipes = pipelining("1f1b", 2, 4)
    with pytest.raises(PlanError):
        planned(manifest, in_place(2, capacity_rows=40000), pipes)


def refused(manifest: Manifest, pipes: Pipelining, **changes: object) -> None:
    servers = in_place(manifest.n_ranks)
    options = PlanningOptions(pipelining=pipes, **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError):
        balanced.plan(manifest, servers, SHAPE, options)


def test_what_does_not_fit_the_pipelines_is_refused() -> None:
    pipes = pipelining("1f1b", 2, 2)
    manifest = drawn(pipes, K, 0)
    refused(manifest, pipelining("1f1b", 2, 2, 2))
    refused(manifest, pipelining("1f1b", 2, 3))
    spanning = [
        RankManifest(0, rank, [[Segment(i, 2 * K, rank * K, K)] for i in range(2)])
        for rank in range(2)
    ]
    refused(Manifest.merge(spanning, 2), pipes)
    based = [replace(server, base_seconds=(1.0, 1.0)) for server in in_place(2)]
    with pytest.raises(PlanError):
        balanced.plan(manifest, based, SHAPE, PlanningOptions(pipelining=pipes))


@pytest.mark.parametrize(
    "change",
    [
        {"layers": (1,)},
        {"layers": (1, -1)},
        {"layers": (0, 0)},
        {"forward_seconds": (1.0, 0.0)},
        {"backward_seconds": (1e-300, 1.0)},
        {"forward_seconds": (1.0, 1e300)},
        {"forward_seconds": (1e-9, 1e-9), "backward_seconds": (1e-3, 1e-3)},
        {"backward_seconds": (float("nan"), 1.0)},
        {"pipeline_ranks": (0, 0)},
        {"pipeline_ranks": (0, 1, 1)},
        {"pipeline_ranks": (0, 2)},
        {"pipeline_ranks": ()},
    ],
)
def test_pipelines_that_are_none(change: dict[str, object]) -> None:
    with pytest.raises(ScheduleError):
        replace(pipelining("1f1b", 2, 2), **change)  # type: ignore[arg-type]


def uneven_profile(rng: np.random.Generator) -> CostProfile:
    """Of a kernel of a small model, whose short tasks take as long as their launches, more or
    less."""
    grid = np.array([1, 16, 32, 64, 128, 256, 512, 1024, 2**20])
    q, kv = grid[:, None], np.maximum(grid[None, :], grid[:, None])
    pairs = causal_qk_pairs(kv - q, kv)
    launch = 1e-4 * 10 ** rng.uniform(-2, 1)
    forward, backward = (
        (share * launch + pairs * 1e-9 * share) * 10 ** rng.uniform(-0.5, 0.5, pairs.shape)
        for share in (1.0, 2.5)
    )
    return replace(
        PROFILE,
        q_tokens=grid,
        kv_tokens=grid,
        forward_seconds=forward,
        backward_seconds=backward,
    )


@pytest.mark.parametrize("seed", range(40))
def test_small_steps_on_servers_of_uneven_rates(seed: int) -> None:
    """Some have no room for any piece on top of what they compute themselves."""
    rng = np.random.default_rng(seed)
    n_halves, n_stages = int(rng.integers(1, 3)), int(rng.integers(2, 5))
    pipes = pipelining("1f1b", n_stages, 2 * n_stages - 1, 3, 10 ** rng.uniform(-3, 0))
    manifest = drawn(pipes, int(rng.choice([64, 257, 1000])), seed, n_halves)
    servers = [
        replace(server, profile=uneven_profile(rng)) for server in in_place(manifest.n_ranks)
    ]
    planned(manifest, servers, pipes)
