"""The ucxx transport against the suite: over shared memory, over TCP, and on GPU memory."""

from __future__ import annotations

import pytest
import torch

from data_plane.buffer_pool import BufferAllocator, device_allocator
from data_plane.transport import PeerReset, Transport
from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.service.data_plane.conformance import TransportConformance


def over_shared_memory() -> UcxxTransport:
    return UcxxTransport(UcxxSettings(one_host=True))


def over_tcp() -> UcxxTransport:
    return UcxxTransport(UcxxSettings())


def on_gpu() -> UcxxTransport:
    return UcxxTransport(UcxxSettings(device="cuda:0", one_host=True))


class TestUcxxOverSharedMemory(TransportConformance):
    peer_factory = f"{__name__}:over_shared_memory"
    loss_of_a_killed_peer = PeerReset

    def make_transport(self) -> Transport:
        return over_shared_memory()


class TestUcxxOverTcp(TransportConformance):
    peer_factory = f"{__name__}:over_tcp"
    loss_of_a_killed_peer = PeerReset

    def make_transport(self) -> Transport:
        return over_tcp()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestUcxxOnGpu(TransportConformance):
    peer_factory = f"{__name__}:on_gpu"
    loss_of_a_killed_peer = PeerReset

    def make_transport(self) -> Transport:
        return on_gpu()

    def allocator(self) -> BufferAllocator:
        return device_allocator("cuda:0")

    @pytest.mark.skip(reason="a GPU worker polls for a while after activity")
    def test_idle_connection_costs_no_cpu(self) -> None: ...  # type: ignore[override]
