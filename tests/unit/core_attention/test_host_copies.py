"""Copies on the host that leave other threads their GPU."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from core_attention.host_copies import HostCopy, on_host

GPU = torch.device("cuda", 0)
CYCLES = 2_000_000_000
"""About a second of a GPU."""

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(120),
]


def test_what_is_on_the_host_is_not_copied() -> None:
    tensor = torch.arange(7, requires_grad=False)
    copy = HostCopy(tensor)
    assert copy.is_done
    assert copy.wait().data_ptr() == tensor.data_ptr()
    assert not on_host(torch.ones(2, requires_grad=True)).requires_grad


class TestOnAGpu:
    pytestmark = needs_gpu

    @pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4)])
    def test_values_are_those_of_the_stream(self, shape: tuple[int, ...]) -> None:
        stream = torch.cuda.Stream(GPU)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(CYCLES // 20)
            tensor = torch.full(shape, 3.0, device=GPU)
            copy = HostCopy(tensor)
            tensor.zero_()
        assert copy.wait().equal(torch.full(shape, 3.0))
        assert copy.is_done

    def test_what_is_not_contiguous_is_copied_whole(self) -> None:
        tensor = torch.arange(12, device=GPU).view(3, 4).t()
        assert on_host(tensor).equal(tensor.cpu())

    def test_other_threads_launch_while_one_waits(self) -> None:
        """With ``tensor.cpu()`` in the place of ``on_host`` they wait for the whole kernel."""
        tensor, small = torch.ones(2**20, device=GPU), torch.ones(8, device=GPU)
        (small + 1).sum().item()
        stream, other = torch.cuda.Stream(GPU), torch.cuda.Stream(GPU)
        began = threading.Event()

        def waits() -> None:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                began.set()
                on_host(tensor)

        thread = threading.Thread(target=waits)
        since = time.perf_counter()
        thread.start()
        began.wait(30)
        time.sleep(0.1)
        with torch.cuda.stream(other):
            launched = small + 1
            other.synchronize()
        took = time.perf_counter() - since
        thread.join(60)
        slept = time.perf_counter() - since
        assert launched.sum() == 16
        assert took < slept / 2, (took, slept)
