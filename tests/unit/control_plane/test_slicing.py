"""All slices at once are the slices one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.jobs.slicing import PlanSlicer
from core_attention.errors import PlanError
from core_attention.plan import Plan
from distca.contract.codec import first_tick_from_bytes, plan_from_proto, plan_to_proto
from distca.v1 import jobs_pb2
from tests.support.plan_slices import for_rank, for_server
from tests.support.strategies import plans


def encoded(plan: Plan) -> bytes:
    return plan_to_proto(plan, "job").SerializeToString()


def step_planned(event: bytes) -> jobs_pb2.StepPlanned:
    return jobs_pb2.PlanEvent.FromString(event).step_planned


@settings(max_examples=60)
@given(plan=plans(), forward_only=st.booleans())
def test_slices_have_the_bytes_of_those_cut_one_by_one(plan: Plan, forward_only: bool) -> None:
    slicer = PlanSlicer(plan, "job", forward_only=forward_only)
    ranks = slicer.rank_events()
    assert len(ranks) == plan.manifest.n_ranks
    for rank, event in enumerate(ranks):
        assert step_planned(event).forward_only == forward_only
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
    with pytest.raises(PlanError):
        slicer.server_event("nobody")


@settings(max_examples=20)
@given(plan=plans())
def test_first_ticks_are_cut_with_their_documents(plan: Plan) -> None:
    def documents(plan: Plan) -> list[tuple[int, int]]:
        columns = plan.manifest.document_id, plan.manifest.document_nano_batch
        return list(zip(*(column.tolist() for column in columns), strict=True))

    first_tick = np.arange(plan.manifest.n_documents) % 3
    of_document = dict(zip(documents(plan), first_tick.tolist(), strict=True))
    for event in PlanSlicer(plan, "job", first_tick=first_tick).rank_events():
        mine = documents(plan_from_proto(step_planned(event).plan))
        found = first_tick_from_bytes(step_planned(event).first_tick, len(mine))
        assert found.tolist() == [of_document[document] for document in mine]
