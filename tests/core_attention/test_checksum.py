"""A changed message is refused, whatever was changed; an unchanged one is taken as it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.ca_task import Phase
from core_attention.checksum import ChecksumMismatch, seal, verify
from core_attention.message import CHECKSUM_BYTES, MessageLayout, reply_layout, request_layout
from core_attention.message_views import message_views
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from tests.strategies import plans

KEY = bytes(range(32))
SHAPE = AttentionShape(num_heads=3, num_heads_kv=1, head_dim=5, head_dim_v=3, dtype="bfloat16")


@given(plan=plans(), phase=st.sampled_from(Phase), data=st.data())
def test_any_flipped_bit_is_found(plan: Plan, phase: Phase, data: st.DataObject) -> None:
    for route in derive_routes(plan.manifest, plan.tasks(phase), 0).values():
        for make_layout in (request_layout, reply_layout):
            layout = make_layout(route, SHAPE, phase, checksums=True)
            plain = make_layout(route, SHAPE, phase)
            assert layout.sections == plain.sections
            if plain.nbytes == 0:
                assert layout.nbytes == 0
                continue
            assert 0 < layout.nbytes - plain.nbytes <= 2 * CHECKSUM_BYTES - 1
            message = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
            seal(message, layout, 7, KEY)
            verify(message, layout, 7, KEY)
            with pytest.raises(ChecksumMismatch, match="memory or network changed it"):
                verify(message, layout, 8, KEY)
            with pytest.raises(ChecksumMismatch):
                verify(message, layout, 7, bytes(32))
            at = data.draw(st.integers(0, layout.nbytes - 1))
            message[at] ^= 1 << data.draw(st.integers(0, 7))
            with pytest.raises(ChecksumMismatch):
                verify(message, layout, 7, KEY)


@given(plan=plans())
def test_sections_are_not_touched(plan: Plan) -> None:
    for route in derive_routes(plan.manifest, plan.forward, 0).values():
        layout = request_layout(route, SHAPE, Phase.FORWARD, checksums=True)
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        views = message_views(message, layout)
        for view in views.values():
            view.fill_(1.5)
        seal(message, layout, 0, KEY)
        assert all(bool((view == 1.5).all()) for view in views.values())


@given(plan=plans())
def test_message_without_a_checksum_is_left_alone(plan: Plan) -> None:
    for route in derive_routes(plan.manifest, plan.forward, 0).values():
        layout = request_layout(route, SHAPE, Phase.FORWARD)
        message = torch.full((layout.nbytes,), 3, dtype=torch.uint8)
        seal(message, layout, 1, KEY)
        verify(message, layout, 2, KEY)
        assert bool((message == 3).all())


def test_rows_changed_by_somebody_who_seals_them_again_are_found() -> None:
    """A checksum without a key he could make himself."""
    layout = MessageLayout((), 4096, has_checksum=True)
    message = torch.zeros(4096, dtype=torch.uint8)
    seal(message, layout, 3, KEY)
    watched = message.clone()
    message[17] = 1
    seal(message, layout, 3, bytes(32))
    with pytest.raises(ChecksumMismatch, match="somebody in between"):
        verify(message, layout, 3, KEY)
    # Nor is the checksum of one message that of another with the same rows.
    with pytest.raises(ChecksumMismatch):
        verify(watched, layout, 4, KEY)
    sealed_again = watched.clone()
    seal(sealed_again, layout, 3, KEY)
    assert not torch.equal(sealed_again, watched)


@pytest.mark.gpu
def test_checksum_of_a_message_on_a_gpu_is_the_hosts() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    # More than is copied at a time, and not a multiple of it.
    nbytes = 40 * 2**20 + 32
    layout = MessageLayout((), nbytes, has_checksum=True)
    on_host = torch.randint(0, 256, (nbytes,), dtype=torch.uint8)
    on_gpu = on_host.cuda()
    seal(on_gpu, layout, 5, KEY)
    verify(on_gpu.cpu(), layout, 5, KEY)
    seal(on_host, layout, 5, KEY)
    verify(on_host.cuda(), layout, 5, KEY)
    on_gpu[100] += 1
    with pytest.raises(ChecksumMismatch):
        verify(on_gpu, layout, 5, KEY)


@pytest.mark.gpu
def test_a_thread_that_was_in_inference_mode_first_goes_on_sealing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    layout = MessageLayout((), 4096 + 32, has_checksum=True)
    message = torch.zeros(layout.nbytes, dtype=torch.uint8, device="cuda")

    def seal_twice() -> None:
        with torch.inference_mode():
            seal(message, layout, 5, KEY)
        seal(message, layout, 6, KEY)

    # A thread keeps what it copies messages with.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(seal_twice).result(30)
    verify(message.cpu(), layout, 6, KEY)
