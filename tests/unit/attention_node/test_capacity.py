"""The planner is told a capacity that fits the memory for messages."""

from __future__ import annotations

import numpy as np
from hypothesis import given

from attention_node.capacity import LANES, rows_within
from core_attention.ca_task import Phase
from core_attention.message import reply_layout, request_layout
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from data_plane.buffer_pool import size_class_bytes
from tests.support.errors import refused
from tests.support.strategies import plans

SHAPE = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")
PADDING_BYTES = 8 * 256 * 1.25
"""Of a message of up to six sections, aligned to 256 bytes, in a block of the pool."""


@given(plan=plans())
def test_ticks_within_the_capacity_fit_the_memory(plan: Plan) -> None:
    """Any plan, with the memory that its largest tick makes the capacity ask for."""
    for phase in Phase:
        tasks = plan.tasks(phase)
        for server in np.unique(tasks.server).tolist():
            routes = [
                route
                for (_, index), route in derive_routes(plan.manifest, tasks, 0).items()
                if index == server
            ]
            n_rows = sum(route.n_q_rows + route.n_kv_rows for route in routes)
            if n_rows == 0:
                continue
            limit = next(n for n in range(10**5, 10**9, 10**5) if rows_within(n, [SHAPE]) >= n_rows)
            needed = sum(
                size_class_bytes(layout(route, SHAPE, phase).nbytes)
                for route in routes
                for layout in (request_layout, reply_layout)
            )
            assert LANES * needed <= limit + 2 * LANES * len(routes) * PADDING_BYTES


def test_largest_shape_counts() -> None:
    small = AttentionShape(num_heads=1, num_heads_kv=1, head_dim=8, head_dim_v=8, dtype="float32")
    assert rows_within(10**8, [small, SHAPE]) == rows_within(10**8, [SHAPE])
    assert rows_within(10**8, [small]) > 100 * rows_within(10**8, [SHAPE])


def test_memory_for_less_than_a_row_is_refused() -> None:
    with refused():
        rows_within(10_000, [SHAPE])
    assert rows_within(62_080, [SHAPE]) == 1
