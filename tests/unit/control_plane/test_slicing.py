"""All slices at once are the slices one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.jobs.slicing import PlanSlicer
from core_attention.ca_task import MaskKind, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan, PlanServer
from distca.contract.codec import first_tick_from_bytes, plan_from_proto, plan_to_proto
from distca.v1 import jobs_pb2
from tests.support.plan_slices import for_rank, for_server


def random_plan(seed: int, n_ranks: int, n_servers: int) -> Plan:
    """Documents over one or two ranks, random tasks on random servers, some of them in-place."""
    rng = np.random.default_rng(seed)
    packed: list[list[list[Segment]]] = [[[], []] for _ in range(n_ranks)]
    for document_id in range(int(rng.integers(1, 12))):
        nano, length = int(rng.integers(2)), int(rng.integers(2, 50))
        cut = int(rng.integers(1, length))
        for offset, end in ((0, cut), (cut, length)):
            rank = int(rng.integers(n_ranks))
            packed[rank][nano].append(Segment(document_id, length, offset, end - offset))
    manifest = Manifest.merge(
        [RankManifest(5, r, tuple(map(tuple, nano))) for r, nano in enumerate(packed)], n_ranks
    )

    def tasks() -> TaskTable:
        rows = []
        for document, offset, length in zip(
            manifest.segment_document,
            manifest.segment_offset,
            manifest.segment_length,
            strict=True,
        ):
            middle = int(rng.integers(length + 1))
            for begin, end in ((0, middle), (middle, length)):
                if end > begin:
                    server = int(rng.integers(n_servers))
                    rows.append((document, offset + begin, offset + end, server))
        return TaskTable(*np.array(rows, dtype=np.int64).T)

    return Plan(
        manifest=manifest,
        epoch=2,
        servers=tuple(
            PlanServer(f"s{i}", None if rng.random() < 0.5 else i % n_ranks, f"h:{i + 1}")
            for i in range(n_servers)
        ),
        forward=tasks(),
        backward=tasks(),
        mask=MaskKind.CAUSAL,
        planner="random",
        reason="dice",
    )


def encoded(plan: Plan) -> bytes:
    return plan_to_proto(plan, "job").SerializeToString()


def step_planned(event: bytes) -> jobs_pb2.StepPlanned:
    return jobs_pb2.PlanEvent.FromString(event).step_planned


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), n_ranks=st.integers(1, 5), n_servers=st.integers(1, 6))
def test_slices_have_the_bytes_of_those_cut_one_by_one(
    seed: int, n_ranks: int, n_servers: int
) -> None:
    plan = random_plan(seed, n_ranks, n_servers)
    slicer = PlanSlicer(plan, "job", forward_only=bool(seed % 2))
    ranks = slicer.rank_events()
    assert len(ranks) == n_ranks
    for rank, event in enumerate(ranks):
        assert step_planned(event).forward_only == bool(seed % 2)
        assert step_planned(event).plan.SerializeToString() == encoded(for_rank(plan, rank))
        assert slicer.rank_event(rank) == event
    servers = slicer.server_events()
    for server in plan.servers:
        one = for_server(plan, server.server_id)
        if server.in_place_rank is not None or not one.manifest.n_documents:
            assert server.server_id not in servers
        else:
            event = servers.pop(server.server_id)
            assert step_planned(event).plan.SerializeToString() == encoded(one)
            assert slicer.server_event(server.server_id) == event
    assert not servers


def test_an_unknown_server_is_an_error() -> None:
    slicer = PlanSlicer(random_plan(1, 2, 2), "job")
    with pytest.raises(PlanError, match=r"'nobody' is not in the plan of step 5"):
        slicer.server_event("nobody")


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32))
def test_first_ticks_are_cut_with_their_documents(seed: int) -> None:
    plan = random_plan(seed, 3, 3)
    first_tick = np.arange(plan.manifest.n_documents) % 3
    of_id = dict(zip(plan.manifest.document_id.tolist(), first_tick.tolist(), strict=True))
    for event in PlanSlicer(plan, "job", first_tick=first_tick).rank_events():
        ids = plan_from_proto(step_planned(event).plan).manifest.document_id.tolist()
        found = first_tick_from_bytes(step_planned(event).first_tick, len(ids))
        assert found.tolist() == [of_id[document_id] for document_id in ids]
