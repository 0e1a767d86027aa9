"""Routes, against a slow implementation that looks at every row by itself."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given

from core_attention.ca_task import Phase
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.routing import PairRoute, derive_routes
from tests.support.plan_slices import for_rank, for_server
from tests.support.strategies import plans

Pair = tuple[int, int]
Row = tuple[int, int, int]
"""(document id, position in it, packed row on its home)."""


def home_of_every_row(manifest: Manifest) -> dict[tuple[int, int], tuple[int, int]]:
    """(document, position) -> (rank, packed row), of carried keys too."""
    homes = {}
    for kind in ("segment", "carried"):
        columns = [
            getattr(manifest, f"{kind}_{name}").tolist()
            for name in ("document", "offset", "length", "rank", "row")
        ]
        for document, offset, length, rank, row in zip(*columns, strict=True):
            for i in range(length):
                homes[document, offset + i] = (rank, row + i)
    return homes


def slow_routes(
    plan: Plan, phase: Phase, nano_batch: int
) -> tuple[dict[Pair, list[Row]], dict[Pair, list[Row]]]:
    """Q rows and K/V rows of every (rank, server), in message order."""
    manifest, tasks = plan.manifest, plan.tasks(phase)
    homes = home_of_every_row(manifest)
    q: dict[Pair, list[Row]] = defaultdict(list)
    needed: set[tuple[int, int, int]] = set()
    for task in range(len(tasks)):
        document, server = int(tasks.document[task]), int(tasks.server[task])
        if manifest.document_nano_batch[document] != nano_batch:
            continue
        document_id = int(manifest.document_id[document])
        for position in range(int(tasks.q_begin[task]), int(tasks.q_end[task])):
            rank, row = homes[document, position]
            q[rank, server].append((document_id, position, row))
        needed |= {(server, document, position) for position in range(int(tasks.q_end[task]))}
    kv: dict[Pair, list[Row]] = defaultdict(list)
    for server, document, position in sorted(needed):
        rank, row = homes[document, position]
        kv[rank, server].append((int(manifest.document_id[document]), position, row))
    return q, kv


def q_rows(plan: Plan, phase: Phase, route: PairRoute) -> list[Row]:
    """The Q rows that ``route`` carries, in message order."""
    tasks = plan.tasks(phase)
    rows = []
    for task, begin, length in zip(route.task, route.q_row, route.q_length, strict=True):
        document_id = int(plan.manifest.document_id[tasks.document[task]])
        first = int(tasks.q_begin[task])
        rows += [(document_id, first + i, int(begin) + i) for i in range(int(length))]
    return rows


def kv_rows(plan: Plan, route: PairRoute) -> list[Row]:
    """The K/V rows that ``route`` carries, in message order."""
    rows = []
    for document, offset, begin, length in zip(
        route.kv_document, route.kv_offset, route.kv_row, route.kv_length, strict=True
    ):
        document_id = int(plan.manifest.document_id[document])
        rows += [(document_id, int(offset) + i, int(begin) + i) for i in range(int(length))]
    return rows


@pytest.mark.parametrize("phase", Phase)
@given(plan=plans())
def test_routes_equal_the_slow_ones(phase: Phase, plan: Plan) -> None:
    for nano_batch in range(plan.manifest.n_nano_batches):
        routes = derive_routes(plan.manifest, plan.tasks(phase), nano_batch)
        slow_q, slow_kv = slow_routes(plan, phase, nano_batch)
        assert list(routes) == sorted(slow_q.keys() | slow_kv.keys())
        for pair, route in routes.items():
            assert (route.rank, route.server) == pair
            assert q_rows(plan, phase, route) == slow_q.get(pair, [])
            assert kv_rows(plan, route) == slow_kv.get(pair, [])
            assert route.q_rows.tolist() == [row for _, _, row in slow_q.get(pair, [])]
            assert route.kv_rows.tolist() == [row for _, _, row in slow_kv.get(pair, [])]
            assert (route.n_q_rows, route.n_kv_rows) == (len(route.q_rows), len(route.kv_rows))


def described(plan: Plan, phase: Phase, nano_batch: int) -> dict[tuple[int, str], object]:
    """Routes in terms that do not depend on how a plan numbers documents, tasks and servers."""
    return {
        (rank, plan.servers[server].server_id): (q_rows(plan, phase, route), kv_rows(plan, route))
        for (rank, server), route in derive_routes(
            plan.manifest, plan.tasks(phase), nano_batch
        ).items()
    }


@pytest.mark.parametrize("phase", Phase)
@given(plan=plans())
def test_slices_give_the_routes_of_the_whole_plan(phase: Phase, plan: Plan) -> None:
    for nano_batch in range(plan.manifest.n_nano_batches):
        whole = described(plan, phase, nano_batch)
        for rank in range(plan.manifest.n_ranks):
            sliced = described(for_rank(plan, rank), phase, nano_batch)
            own = {s.server_id for s in plan.servers if s.in_place_rank == rank}
            mine = {pair for pair in whole if pair[0] == rank or pair[1] in own}
            assert {pair for pair in sliced if pair[0] == rank or pair[1] in own} == mine
            for pair in mine:
                assert sliced[pair] == whole[pair]
        for server in plan.servers:
            sliced = described(for_server(plan, server.server_id), phase, nano_batch)
            mine = {pair for pair in whole if pair[1] == server.server_id}
            assert {pair for pair in sliced if pair[1] == server.server_id} == mine
            for pair in mine:
                assert sliced[pair] == whole[pair]
