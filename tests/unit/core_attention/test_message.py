"""Message layouts: every section usable in place, requests and replies alike on both sides."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.ca_task import Phase
from core_attention.message import (
    CHECKSUM_BYTES,
    SECTION_ALIGNMENT_BYTES,
    MessageLayout,
    reply_layout,
    request_layout,
)
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import DTYPE_BYTES, AttentionShape
from tests.support.strategies import plans

shapes = st.builds(
    lambda kv, group, dims, dtype: AttentionShape(
        num_heads=kv * group,
        num_heads_kv=kv,
        head_dim=dims[0],
        head_dim_v=dims[1],
        dtype=dtype,
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from(sorted(DTYPE_BYTES)),
)


def layouts(plan: Plan, shape: AttentionShape, phase: Phase) -> list[MessageLayout]:
    return [
        layout(route, shape, phase)
        for nano_batch in range(plan.manifest.n_nano_batches)
        for route in derive_routes(plan.manifest, plan.tasks(phase), nano_batch).values()
        for layout in (request_layout, reply_layout)
    ]


@pytest.mark.parametrize("phase", Phase)
@given(plan=plans(), shape=shapes)
def test_sections_are_aligned_apart_and_usable_as_tensors(
    phase: Phase, plan: Plan, shape: AttentionShape
) -> None:
    for layout in layouts(plan, shape, phase):
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        end = 0
        for section in layout.sections:
            assert section.begin_bytes % SECTION_ALIGNMENT_BYTES == 0
            tensor = message[section.begin_bytes : section.end_bytes]
            tensor = tensor.view(getattr(torch, section.dtype)).view(section.shape)
            assert tensor.numel() * tensor.element_size() == section.end_bytes - section.begin_bytes
            if tensor.numel():
                assert section.begin_bytes >= end
                assert section.begin_bytes - end < SECTION_ALIGNMENT_BYTES
                end = section.end_bytes
        room = layout.nbytes - end
        assert CHECKSUM_BYTES <= room < 2 * CHECKSUM_BYTES if end else not room


@given(plan=plans(), shape=shapes)
def test_sizes_are_those_of_the_rows(plan: Plan, shape: AttentionShape) -> None:
    for nano_batch in range(plan.manifest.n_nano_batches):
        for route in derive_routes(plan.manifest, plan.backward, nano_batch).values():
            q_rows, kv_rows = route.n_q_rows, route.n_kv_rows
            request = request_layout(route, shape, Phase.BACKWARD)
            assert sum(s.end_bytes - s.begin_bytes for s in request.sections) == (
                q_rows * (shape.q_row_bytes + shape.o_row_bytes + 2 * shape.lse_row_bytes)
                + kv_rows * shape.kv_row_bytes
            )
            reply = reply_layout(route, shape, Phase.BACKWARD)
            assert sum(s.end_bytes - s.begin_bytes for s in reply.sections) == (
                q_rows * shape.q_row_bytes + kv_rows * shape.kv_row_bytes
            )
            forward_reply = reply_layout(route, shape, Phase.FORWARD)
            assert (forward_reply.nbytes == 0) == (q_rows == 0)


@given(plan=plans())
def test_sections_come_in_the_documented_order(plan: Plan) -> None:
    shape = AttentionShape(num_heads=2, num_heads_kv=1, head_dim=4, head_dim_v=3, dtype="bfloat16")
    for route in derive_routes(plan.manifest, plan.forward, 0).values():
        for phase, request, reply in (
            (Phase.FORWARD, ["q", "k", "v"], ["o", "lse"]),
            (Phase.BACKWARD, ["q", "k", "v", "do", "lse", "delta"], ["dq", "dk", "dv"]),
        ):
            assert [s.name for s in request_layout(route, shape, phase).sections] == request
            assert [s.name for s in reply_layout(route, shape, phase).sections] == reply
        by_name = {s.name: s for s in request_layout(route, shape, Phase.BACKWARD).sections}
        assert by_name["k"].shape == (route.n_kv_rows, 1, 4)
        assert by_name["do"].shape == (route.n_q_rows, 2, 3)
        assert by_name["lse"].shape == (route.n_q_rows, 2)
        assert (by_name["lse"].dtype, by_name["v"].dtype) == ("float32", "bfloat16")
