"""Device memory from the driver: what PyTorch's settings cannot take away from the transports."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from data_plane.buffer_pool import BufferPool, device_allocator
from data_plane.device_memory import allocate
from tests.support.programs import ran_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)

EXPORTED = """
import torch
from data_plane.buffer_pool import BufferPool, device_allocator
from tests.service.data_plane.test_device_memory import exportable
torch.ones(1, device="cuda")
ours = BufferPool(device_allocator("cuda:0")).acquire(2**22)
print(exportable(ours.tensor), exportable(torch.empty(2**22, dtype=torch.uint8, device="cuda")))
"""


def exportable(tensor: torch.Tensor) -> bool:
    """Whether cuda_ipc can give the memory behind ``tensor`` to another process."""
    handle = (ctypes.c_byte * 64)()
    address = ctypes.c_uint64(tensor.data_ptr())
    torch.cuda.synchronize()
    status: int = ctypes.CDLL("libcuda.so.1").cuIpcGetMemHandle(ctypes.byref(handle), address)
    return status == 0


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(DEVICE)[0]


@pytest.mark.parametrize(("setting", "theirs"), [("True", False), ("False", True)])
def test_buffers_can_be_exported_whatever_pytorch_is_told(setting: str, theirs: bool) -> None:
    """The second value shows that the first is not true of any memory."""
    done = ran_python(
        EXPORTED, env=os.environ | {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{setting}"}
    )
    assert done.stdout.split() == ["True", str(theirs)], done.stderr


def test_kernels_read_and_write_a_block() -> None:
    block = allocate(1000, DEVICE)
    assert (block.dtype, block.shape, block.device) == (torch.uint8, (1000,), DEVICE)
    block.copy_(torch.arange(1000) % 251)
    assert torch.equal(block.cpu(), (torch.arange(1000) % 251).to(torch.uint8))


def test_memory_goes_back_with_the_last_tensor() -> None:
    torch.ones(1, device=DEVICE)
    before = free_bytes()
    block = allocate(2**28, DEVICE)
    rest = block[100:]
    del block
    assert before - free_bytes() >= 2**28
    del rest
    assert before - free_bytes() < 2**22


def test_a_pool_takes_what_pytorchs_cache_holds_idle() -> None:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    cached = torch.empty(int(free * 0.9), dtype=torch.uint8, device=DEVICE)
    del cached
    assert BufferPool(device_allocator(DEVICE)).acquire(int(free * 0.5)).nbytes > 0


def test_more_than_there_is_names_both_numbers() -> None:
    with pytest.raises(torch.OutOfMemoryError, match="1099511627776 bytes on cuda:0, "):
        allocate(2**40, DEVICE)
