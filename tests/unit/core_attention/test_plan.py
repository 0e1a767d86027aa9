"""Plans: checks, look-ups, slices and imbalance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from core_attention.ca_task import Phase
from core_attention.errors import PlanError
from core_attention.plan import PhaseForecast, Plan, PlanServer, imbalance
from tests.support.plan_slices import for_rank, for_server
from tests.support.strategies import plans


@given(plans())
def test_a_rank_slice_holds_what_the_rank_needs_and_no_more(plan: Plan) -> None:
    for rank in range(plan.manifest.n_ranks):
        part = for_rank(plan, rank)
        held = plan.manifest.held
        at_home = held.document[held.rank == rank]
        own = [i for i, s in enumerate(plan.servers) if s.in_place_rank == rank]
        served = {
            int(d)
            for table in (plan.forward, plan.backward)
            for d, server in zip(table.document, table.server, strict=True)
            if server in own
        }
        wanted = sorted(set(at_home.tolist()) | served)
        assert part.manifest.document_id.tolist() == plan.manifest.document_id[wanted].tolist()
        assert (part.step, part.epoch, part.reason) == (plan.step, plan.epoch, plan.reason)


@given(plans())
def test_a_slice_keeps_each_document_s_tasks_on_their_servers(plan: Plan) -> None:
    def named(some: Plan, document: int) -> tuple[int, int]:
        manifest = some.manifest
        id_, nano_batch = manifest.document_id[document], manifest.document_nano_batch[document]
        return int(id_), int(nano_batch)

    def tasks_of(some: Plan, phase: Phase) -> set[tuple[int, int, int, int, str]]:
        table = some.tasks(phase)
        return {
            (*named(some, d), int(b), int(e), some.servers[s].server_id)
            for d, b, e, s in zip(
                table.document, table.q_begin, table.q_end, table.server, strict=True
            )
        }

    for server in plan.servers:
        part = for_server(plan, server.server_id)
        kept = {named(part, d) for d in range(part.manifest.n_documents)}
        for phase in Phase:
            expected = {task for task in tasks_of(plan, phase) if task[:2] in kept}
            assert tasks_of(part, phase) == expected
            names = [s.server_id for s in plan.servers]
            order = [names.index(s.server_id) for s in part.servers]
            assert order == sorted(order)


@given(plans())
def test_an_unknown_server_is_an_error(plan: Plan) -> None:
    assert plan.server_index("nobody") is None
    assert plan.server_index("server-0") == 0


@given(plans())
def test_tasks_and_servers_are_checked_on_creation(plan: Plan) -> None:
    with pytest.raises(PlanError, match="servers appear twice"):
        replace(plan, servers=(*plan.servers, plan.servers[0]))
    with pytest.raises(PlanError, match="names server"):
        replace(plan, servers=())
    assert len(replace(plan, servers=(*plan.servers, PlanServer("x", None, ""))).servers) > 1


def test_imbalance_is_the_worst_row_s_max_over_mean() -> None:
    assert imbalance(np.array([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(1.5)
    assert imbalance(np.array([2.0, 2.0])) == 1.0
    assert imbalance(np.zeros((2, 3))) == 1.0


def test_a_forecast_is_read_only_and_gives_imbalances() -> None:
    rows = np.array([[1, 1]])
    forecast = PhaseForecast(
        home_seconds=np.array([[1.0, 3.0]]),
        seconds=np.array([[2.0, 2.0]]),
        q_rows=rows,
        kv_rows=rows,
        bytes_in=rows,
        bytes_out=rows,
    )
    assert forecast.home_imbalance == pytest.approx(1.5)
    assert forecast.predicted_imbalance == 1.0
    with pytest.raises(ValueError, match="read-only"):
        forecast.seconds[0, 0] = 1.0
