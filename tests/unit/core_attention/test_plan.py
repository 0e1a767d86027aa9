"""Plans: checks, look-ups, slices and imbalance."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given

from core_attention.errors import PlanError
from core_attention.plan import Plan, PlanServer, imbalance
from tests.support.strategies import plans


@given(plans())
def test_tasks_and_servers_are_checked_on_creation(plan: Plan) -> None:
    assert plan.server_index("nobody") is None
    assert plan.server_index("server-0") == 0
    with pytest.raises(PlanError):
        replace(plan, servers=(*plan.servers, plan.servers[0]))
    with pytest.raises(PlanError):
        replace(plan, servers=())
    assert len(replace(plan, servers=(*plan.servers, PlanServer("x", None, ""))).servers) > 1


def test_imbalance_is_the_worst_row_s_max_over_mean() -> None:
    assert imbalance(np.array([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(1.5)
    assert imbalance(np.array([2.0, 2.0])) == 1.0
    assert imbalance(np.zeros((2, 3))) == 1.0
