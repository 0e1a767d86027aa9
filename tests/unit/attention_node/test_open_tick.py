"""Ticks on one server: any plan, any order of arrival, against the reference."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_node.open_tick import OpenTick, Source
from attention_node.tick_route import ASSEMBLED, TickRoute, derive_tick_route
from core_attention.ca_task import Phase, TaskTable
from core_attention.kernels.cpu import CpuKernel
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan
from tests.support.strategies import plans
from tests.unit.attention_node.cases import (
    SCALE,
    Rank,
    home_rows,
    make_documents,
    make_plan,
    make_source,
    open_tick,
)

SPANNING = [
    RankManifest(0, 0, ((Segment(1, 30, 0, 12), Segment(2, 9, 0, 9)),)),
    RankManifest(0, 1, ((Segment(3, 4, 0, 4), Segment(1, 30, 12, 10)),)),
    RankManifest(0, 2, ((Segment(1, 30, 22, 8),),)),
]
"""Document 1 spans three ranks."""

SPANNING_TASKS = TaskTable(
    document=np.array([0, 0, 0, 0, 1, 2]),
    q_begin=np.array([0, 5, 12, 22, 0, 0]),
    q_end=np.array([5, 12, 22, 30, 9, 4]),
    server=np.zeros(6, dtype=np.int64),
)


def run_parts(tick: OpenTick, ready: list[int], phase: Phase) -> None:
    kernel = CpuKernel()
    with torch.no_grad():
        for index in ready:
            if phase is Phase.FORWARD:
                kernel.forward([tick.forward_part(index)], SCALE)
            else:
                kernel.backward([tick.backward_part(index)], SCALE)
            tick.part_done(index)


def run_tick(
    route: TickRoute,
    ranks: list[Rank],
    order: Sequence[int],
    phase: Phase,
    local: int | None = None,
) -> OpenTick:
    closed: list[OpenTick] = []
    tick = open_tick(route, phase, closed.append)
    for rank in order:
        source = make_source(route, rank, ranks[rank], phase, local=rank == local)
        run_parts(tick, tick.arrive(rank, source), phase)
    assert closed == [tick]
    return tick


def check_replies(
    manifest: Manifest, routes: list[TickRoute], nano_batch: int, phase: Phase
) -> None:
    """Runs every server's tick and compares what comes home, summed over servers."""
    if not routes:
        return
    _, expected = make_documents(manifest, nano_batch)
    names = ("o", "lse") if phase is Phase.FORWARD else ("dq", "dk", "dv")
    total = {name: torch.zeros_like(getattr(expected, name)) for name in names}
    for route in routes:
        ranks, _ = make_documents(manifest, nano_batch)
        run_tick(route, ranks, sorted(route.pairs), phase)
        for rank, pair in route.pairs.items():
            assert len(ranks[rank].replies) == 1
            home = home_rows(manifest, rank, nano_batch)
            for name in names:
                packed = pair.kv_rows if name in ("dk", "dv") else pair.q_rows
                rows = home[torch.from_numpy(packed)]
                total[name].index_add_(0, rows, ranks[rank].replies[0][name].double())
    for name in names:
        # float32 sums of a few hundred unit-sized products, each rounded to 6e-8.
        torch.testing.assert_close(total[name], getattr(expected, name), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    ("order", "local"),
    [
        *((order, None) for order in permutations(range(3))),
        *(((0, 1, 2), rank) for rank in range(3)),
    ],
)
def test_any_order_of_arrival_and_tensors_in_place_give_equal_bits(
    order: tuple[int, ...], local: int | None, phase: Phase
) -> None:
    results = []
    for arrival, local_rank in (((0, 1, 2), None), (order, local)):
        plan = make_plan(SPANNING, SPANNING_TASKS, local_rank=local_rank)
        route = derive_tick_route(plan, 0, 0, phase, local_rank)
        ranks, _ = make_documents(plan.manifest)
        run_tick(route, ranks, arrival, phase, local_rank)
        results.append([rank.replies[0] for rank in ranks])
    for first, second in zip(*results, strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("phase", list(Phase))
def test_own_parts_of_limited_work_give_equal_bits(phase: Phase) -> None:
    """Two documents of rank 0, one in three tasks, and one of rank 1, whose last queries rank 0's
    server computes."""
    manifests = [RankManifest.from_lengths(0, 0, [[500, 300]])]
    manifests.append(RankManifest.from_lengths(0, 1, [[100]]))
    tasks = TaskTable(
        document=np.array([0, 0, 0, 1, 2, 2]),
        q_begin=np.array([0, 130, 290, 0, 0, 40]),
        q_end=np.array([130, 290, 500, 300, 40, 100]),
        server=np.array([0, 0, 0, 0, 1, 0]),
    )
    plan = make_plan(manifests, tasks, n_servers=2, local_rank=0)
    results = []
    for own_pairs in (None, 20_000):
        route = derive_tick_route(plan, 0, 0, phase, 0, own_pairs=own_pairs)
        n_own = sum(part.is_own for part in route.parts)
        # Backward, a document's tasks stay together, however many they are.
        assert n_own == (1 if own_pairs is None else {Phase.FORWARD: 6, Phase.BACKWARD: 2}[phase])
        assert [part.q_source for part in route.parts if not part.is_own] == [1]
        ranks, _ = make_documents(plan.manifest)
        run_tick(route, ranks, [0, 1], phase, local=0)
        results.append([rank.replies[0] for rank in ranks])
    for first, second in zip(*results, strict=True):
        for name, rows in first.items():
            if phase is Phase.BACKWARD:
                assert torch.equal(rows, second[name])
            else:
                # Cut elsewhere, products of matrices of other sizes are rounded otherwise.
                torch.testing.assert_close(rows, second[name], rtol=1e-6, atol=1e-6)


def test_a_late_source_holds_up_only_the_tasks_that_need_it() -> None:
    plan = make_plan(SPANNING, SPANNING_TASKS)
    route = derive_tick_route(plan, 0, 0, Phase.FORWARD, None)
    ranks, expected = make_documents(plan.manifest)
    tick = open_tick(route, Phase.FORWARD, lambda tick: None)
    ready = tick.arrive(0, make_source(route, 0, ranks[0], Phase.FORWARD, local=False))
    run_parts(tick, ready, Phase.FORWARD)
    assert len(ranks[0].replies) == 1, "rank 0 needs no other rank's keys"
    ready = tick.arrive(2, make_source(route, 2, ranks[2], Phase.FORWARD, local=False))
    assert ready == [], "rank 2's task needs keys of rank 1"
    ready = tick.arrive(1, make_source(route, 1, ranks[1], Phase.FORWARD, local=False))
    run_parts(tick, ready, Phase.FORWARD)
    assert [len(rank.replies) for rank in ranks] == [1, 1, 1]
    assert [rank.released for rank in ranks] == [1, 1, 1]
    o = ranks[0].replies[0]["o"].double()
    torch.testing.assert_close(o[:12], expected.o[:12], rtol=1e-5, atol=1e-5)


def test_keys_are_copied_only_where_they_lie_in_pieces() -> None:
    plan = make_plan(SPANNING, SPANNING_TASKS)
    route = derive_tick_route(plan, 0, 0, Phase.FORWARD, None)
    sources = {(part.q_source, part.k_source) for part in route.parts}
    assert sources == {(0, 0), (1, 1), (1, ASSEMBLED), (2, ASSEMBLED)}
    assert route.n_assembled_rows == 30


def test_a_rank_whose_reply_fails_is_told_and_keeps_no_inputs() -> None:
    plan = make_plan(SPANNING, SPANNING_TASKS)
    route = derive_tick_route(plan, 0, 0, Phase.FORWARD, None)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, Phase.FORWARD, lambda tick: None)

    def fail() -> None:
        raise ZeroDivisionError

    source = make_source(route, 0, ranks[0], Phase.FORWARD, local=False)
    ready = tick.arrive(0, replace(source, reply=fail))
    with pytest.raises(ZeroDivisionError) as raised:
        run_parts(tick, ready, Phase.FORWARD)
    tick.give_up(raised.value)
    assert ranks[0].failures == [raised.value]
    assert ranks[0].released == 1


def watched(source: Source) -> tuple[Source, list[weakref.ref[torch.Tensor]]]:
    """The same source with tensors that nobody else holds; answers are dropped."""
    inputs = {name: rows.clone() for name, rows in source.inputs.items()}
    outputs = {name: rows.clone() for name, rows in source.outputs.items()}
    watched = [weakref.ref(rows) for rows in (*inputs.values(), *outputs.values())]
    mine = replace(source, inputs=inputs, outputs=outputs, reply=lambda: None, release=lambda: None)
    return mine, watched


@pytest.mark.parametrize("phase", list(Phase))
def test_a_rank_is_let_go_with_its_reply(phase: Phase) -> None:
    """In pipelines the other ranks of the tick are slots behind."""
    manifests = [RankManifest.from_lengths(0, rank, [[7, 3]]) for rank in range(2)]
    tasks = TaskTable(*np.array([[0, 1, 2, 3], [0] * 4, [7, 3, 7, 3], [0] * 4]))
    plan = make_plan(manifests, tasks, local_rank=0)
    route = derive_tick_route(plan, 0, 0, phase, 0)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, phase, lambda tick: None)
    source, tensors = watched(make_source(route, 0, ranks[0], phase, local=True))
    ready = tick.arrive(0, source)
    del source
    assert all(ref() is not None for ref in tensors)
    run_parts(tick, ready, phase)
    assert not tick.closed
    assert all(ref() is None for ref in tensors)
    assert not tick._gradients
    again = make_source(route, 0, ranks[0], phase, local=True)
    assert tick.arrive(0, again) == []
    assert len(ranks[0].failures) == 1
    later = make_source(route, 1, ranks[1], phase, local=False)
    run_parts(tick, tick.arrive(1, later), phase)
    assert tick.closed
    assert len(ranks[1].replies) == 1


def test_sums_are_let_go_with_the_last_reply_that_takes_from_them() -> None:
    """Document 1 begins on rank 0, and tasks of ranks 1 and 2 read its keys there."""
    plan = make_plan(SPANNING, SPANNING_TASKS)
    route = derive_tick_route(plan, 0, 0, Phase.BACKWARD, None)
    ranks, _ = make_documents(plan.manifest)
    tick = open_tick(route, Phase.BACKWARD, lambda tick: None)
    held: list[set[int]] = []
    for rank in range(3):
        source = make_source(route, rank, ranks[rank], Phase.BACKWARD, local=False)
        ready = tick.arrive(
            rank, replace(source, release=lambda: held.append(set(tick._gradients)))
        )
        run_parts(tick, ready, Phase.BACKWARD)
    takers = [{part for part, _ in route.dk_sums[rank]} for rank in range(3)]
    assert held == [takers[1] | takers[2], takers[2], set()]
    assert takers[2] < takers[0], "a part is taken from by several ranks"


def test_giving_up_tells_those_who_have_sent() -> None:
    plan = make_plan(SPANNING, SPANNING_TASKS)
    route = derive_tick_route(plan, 0, 0, Phase.FORWARD, None)
    ranks, _ = make_documents(plan.manifest)
    closed: list[OpenTick] = []
    tick = open_tick(route, Phase.FORWARD, closed.append)
    tick.arrive(2, make_source(route, 2, ranks[2], Phase.FORWARD, local=False))
    error = RuntimeError("the job was closed")
    tick.give_up(error)
    tick.give_up(error)
    assert ranks[2].failures == [error]
    assert ranks[2].released == 1
    assert closed == [tick]
    tick.arrive(1, make_source(route, 1, ranks[1], Phase.FORWARD, local=False))
    assert ranks[1].failures == [error]
    assert ranks[1].released == 1


@settings(max_examples=80)
@given(plan=plans(cuts=False), phase=st.sampled_from(Phase))
def test_random_plans_match_the_reference(plan: Plan, phase: Phase) -> None:
    for nano_batch in range(plan.manifest.n_nano_batches):
        routes = [
            derive_tick_route(plan, server, nano_batch, phase, None)
            for server in range(len(plan.servers))
        ]
        check_replies(plan.manifest, [r for r in routes if r.pairs], nano_batch, phase)
