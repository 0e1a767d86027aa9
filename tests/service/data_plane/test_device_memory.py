"""Device memory from the driver: what PyTorch's settings cannot take away from the transports."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch

from data_plane.buffer_pool import BufferPool, device_allocator
from data_plane.device_memory import DeviceBlock, Driver, HandleKind, allocate
from tests.support.programs import ran_python

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = torch.device("cuda", 0)

EXPORTED = """
import torch
from data_plane.buffer_pool import BufferPool, device_allocator
from data_plane.device_memory import Driver
from tests.service.data_plane.test_device_memory import exportable
torch.ones(1, device="cuda")
ours = BufferPool(device_allocator("cuda:0")).acquire(2**22)
theirs = torch.empty(2**22, dtype=torch.uint8, device="cuda")
print(not Driver.of(0).fabric_obstacle or exportable(ours.tensor), exportable(theirs))
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


PEER = """
import sys, torch
from data_plane.device_memory import DeviceBlock, Driver, HandleKind
kind, exported, nbytes = HandleKind[sys.argv[1]], bytes.fromhex(sys.argv[2]), int(sys.argv[3])
block = DeviceBlock.__new__(DeviceBlock)
block._driver, block._nbytes = Driver.of(0), nbytes
block._address = block._driver.map(block._driver.imported(exported, kind), nbytes, kind)
theirs = torch.as_tensor(block, device="cuda:0")
theirs[nbytes // 2 :] = theirs[: nbytes // 2] + 4
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("kind", [HandleKind.FILE_DESCRIPTOR, HandleKind.FABRIC])
def test_another_process_maps_a_block_by_its_handle(kind: HandleKind) -> None:
    """All of it but another host; a file descriptor goes the same way where there is no fabric."""
    driver, nbytes = Driver.of(0), 3 * 2**20
    if kind is HandleKind.FABRIC and driver.fabric_obstacle:
        pytest.skip(driver.fabric_obstacle)
    ours = torch.as_tensor(DeviceBlock(nbytes, DEVICE, kind), device=DEVICE)
    ours.fill_(3)
    torch.cuda.synchronize()
    exported = driver.exported(ours.data_ptr(), kind)
    files = [int.from_bytes(exported[:4], "little")] if kind is HandleKind.FILE_DESCRIPTOR else []
    ran_python(PEER, kind.name, exported.hex(), f"{nbytes}", pass_fds=files, check=True)
    assert ours[: nbytes // 2].eq(3).all()
    assert ours[nbytes // 2 :].eq(7).all()


def test_kernels_read_and_write_a_block() -> None:
    block = allocate(1000, DEVICE)
    assert (block.dtype, block.shape, block.device) == (torch.uint8, (1000,), DEVICE)
    block.copy_(torch.arange(1000) % 251)
    assert torch.equal(block.cpu(), (torch.arange(1000) % 251).to(torch.uint8))


@pytest.mark.parametrize("kind", [HandleKind.PLAIN, HandleKind.FILE_DESCRIPTOR])
def test_memory_goes_back_with_the_last_tensor(kind: HandleKind) -> None:
    torch.ones(1, device=DEVICE)
    before = free_bytes()
    block = torch.as_tensor(DeviceBlock(2**28, DEVICE, kind), device=DEVICE)
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


def test_more_than_there_is_cannot_be_had() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        allocate(2**40, DEVICE)
