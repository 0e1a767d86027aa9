"""A changed message is refused, whatever was changed; an unchanged one is taken as it is."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from core_attention.ca_task import Phase
from core_attention.checksum import ChecksumMismatch, seal, verify
from core_attention.message import CHECKSUM_BYTES, reply_layout, request_layout
from core_attention.message_views import message_views
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from tests.support.strategies import plans

KEY = bytes(range(32))
SHAPE = AttentionShape(num_heads=3, num_heads_kv=1, head_dim=5, head_dim_v=3, dtype="bfloat16")


def random_message(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@given(plan=plans(), phase=st.sampled_from(Phase), data=st.data())
def test_any_flipped_bit_is_found(plan: Plan, phase: Phase, data: st.DataObject) -> None:
    for route in derive_routes(plan.manifest, plan.tasks(phase), 0).values():
        for make_layout in (request_layout, reply_layout):
            message = random_message(make_layout(route, SHAPE, phase).nbytes)
            seal(message, 7, KEY)
            verify(message, 7, KEY)
            if not len(message):
                continue
            with pytest.raises(ChecksumMismatch):
                verify(message, 8, KEY)
            with pytest.raises(ChecksumMismatch):
                verify(message, 7, bytes(32))
            at = data.draw(st.integers(0, len(message) - 1))
            message[at] ^= 1 << data.draw(st.integers(0, 7))
            with pytest.raises(ChecksumMismatch):
                verify(message, 7, KEY)


@given(plan=plans())
def test_sections_are_not_touched(plan: Plan) -> None:
    for route in derive_routes(plan.manifest, plan.forward, 0).values():
        layout = request_layout(route, SHAPE, Phase.FORWARD)
        message = torch.zeros(layout.nbytes, dtype=torch.uint8)
        views = message_views(message, layout)
        for view in views.values():
            view.fill_(1.5)
        seal(message, 0, KEY)
        assert all(bool((view == 1.5).all()) for view in views.values())


def test_nothing_that_was_seen_makes_the_checksum_of_other_rows() -> None:
    seen, other = random_message(4096), random_message(4096)
    for message in (seen, other):
        seal(message, 3, KEY)
    swapped = torch.cat([seen[:-CHECKSUM_BYTES], other[-CHECKSUM_BYTES:]])
    with pytest.raises(ChecksumMismatch):
        verify(swapped, 3, KEY)
    # Differences of codes of one tag tell nothing, as each has a nonce of its own.
    again = seen.clone()
    seal(again, 3, KEY)
    assert not torch.equal(again, seen)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "blocks", [1, 4, 4095, 4096, 4097, 5 * 4096 + 3, 300 * 4096, 40 * 2**16 + 5, 2**24]
)
@pytest.mark.parametrize("byte", [None, 0, 255])
def test_checksum_of_a_message_on_a_gpu_is_the_hosts(blocks: int, byte: int | None) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    on_host = random_message(16 * blocks + CHECKSUM_BYTES)
    if byte is not None:
        on_host.fill_(byte)
    on_gpu = on_host.cuda()
    seal(on_gpu, 5, KEY)
    # As a message that has arrived, it is complete: verifying reads it behind no kernel.
    torch.cuda.synchronize()
    verify(on_gpu, 5, KEY)
    verify(on_gpu.cpu(), 5, KEY)
    seal(on_host, 5, KEY)
    verify(on_host.cuda(), 5, KEY)
    for at in (0, 8 * blocks, 16 * blocks - 1, 16 * blocks, len(on_host) - 1):
        changed = on_gpu.clone()
        changed[at] ^= 64
        torch.cuda.synchronize()
        with pytest.raises(ChecksumMismatch):
            verify(changed, 5, KEY)


@pytest.mark.gpu
def test_sealing_waits_for_nothing_that_the_stream_has() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    message = random_message(2**20).cuda()
    for turn in range(2):
        if turn:
            # Not the first time: the first launch of a kernel waits for the device.
            torch.cuda.synchronize()
            torch.cuda._sleep(2**31)
        message[:-CHECKSUM_BYTES].add_(1)
        seal(message, 5, KEY)
    launched = torch.cuda.current_stream().record_event()
    assert not launched.query()
    launched.synchronize()
    verify(message, 5, KEY)


@pytest.mark.gpu
def test_a_thread_that_was_in_inference_mode_first_goes_on_sealing() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    message = torch.zeros(4096, dtype=torch.uint8, device="cuda")

    def seal_twice() -> None:
        with torch.inference_mode():
            seal(message, 5, KEY)
        seal(message, 6, KEY)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(seal_twice).result(30)
    verify(message.cpu(), 6, KEY)
