"""nixl against the suite: over shared memory, TCP and libfabric, and on GPU memory."""

from __future__ import annotations

import pytest
import torch

from data_plane.buffer_pool import BufferAllocator, device_allocator
from data_plane.nixl.agent import NixlAgent
from data_plane.nixl.libfabric import LibfabricTransport
from data_plane.nixl.settings import NixlSettings
from data_plane.nixl.transport import NixlTransport
from data_plane.transport import PeerReset, Transport
from tests.service.data_plane.conformance import Pair, TransportConformance


def over_shared_memory() -> NixlTransport:
    return NixlTransport(NixlSettings(one_host=True))


def over_tcp() -> NixlTransport:
    return NixlTransport(NixlSettings())


def over_libfabric() -> NixlTransport:
    return LibfabricTransport(NixlSettings(backend="LIBFABRIC"))


def on_gpu() -> NixlTransport:
    return NixlTransport(NixlSettings(device="cuda:0", one_host=True))


class NixlConformance(TransportConformance):
    stops_transfers = False
    loss_of_a_killed_peer = PeerReset


class TestNixlOverSharedMemory(NixlConformance):
    peer_factory = f"{__name__}:over_shared_memory"

    def make_transport(self) -> Transport:
        return over_shared_memory()


class TestNixlOverTcp(NixlConformance):
    peer_factory = f"{__name__}:over_tcp"

    def make_transport(self) -> Transport:
        return over_tcp()


class TestNixlOverLibfabric(NixlConformance):
    """Over its TCP, where there is no EFA: the same calls of nixl."""

    peer_factory = f"{__name__}:over_libfabric"

    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def libfabric() -> None:
        try:
            NixlAgent(NixlSettings(backend="LIBFABRIC"))
        except RuntimeError as error:
            pytest.skip(str(error))

    def make_transport(self) -> Transport:
        return over_libfabric()

    @pytest.mark.skip(reason="a thread of libfabric polls")
    def test_idle_connection_costs_no_cpu(self, pair: Pair) -> None:
        pass


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestNixlOnGpu(NixlConformance):
    peer_factory = f"{__name__}:on_gpu"

    def make_transport(self) -> Transport:
        return on_gpu()

    def allocator(self) -> BufferAllocator:
        return device_allocator("cuda:0")
