"""Device memory straight from the CUDA driver, for buffers that other processes read.

PyTorch's allocator may map its memory piece by piece (``expandable_segments:True``, which keeps
long-context steps from fragmenting it), and cuda_ipc cannot export such memory. Plain allocations
can always be exported and registered, whatever the allocator's settings are.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import torch

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2


class DriverError(RuntimeError):
    """A call of the CUDA driver failed; the message has its name and the driver's reason."""


class DeviceBlock:
    """Plain memory of a CUDA device; goes back to the driver with the last tensor over it.

    Going back waits until the device has done all its work, as cuMemFree does, so it is for the
    end of a job or of a pool, not for the middle of a step.

    Args:
        nbytes: 1 or more.
        device: a CUDA device.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._address = 0
        index = torch.cuda.current_device() if device.index is None else device.index
        self._driver = _Driver.of(index)
        address = self._driver.allocate(nbytes)
        if address is None:
            # What PyTorch keeps for later has room for what is needed now.
            torch.cuda.empty_cache()
            address = self._driver.allocate(nbytes)
        if address is None:
            free, total = torch.cuda.mem_get_info(device)
            raise torch.OutOfMemoryError(
                f"no room for {nbytes} bytes on {device}, {free} of {total} are free: give the "
                "model less, or the servers a buffer limit"
            )
        self._address = address
        self._nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The interface by which PyTorch takes over the memory without a copy; see Numba's CUDA
        array interface."""
        return {
            "shape": (self._nbytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "version": 2,
        }

    def __del__(self) -> None:
        if self._address:
            self._driver.free(self._address)


def allocate(nbytes: int, device: torch.device) -> torch.Tensor:
    """Returns ``nbytes`` (1 or more) of plain memory of a CUDA device: 1-D uint8, uninitialised.

    Raises:
        torch.OutOfMemoryError, DriverError: the device has no room, or refuses.
    """
    return torch.as_tensor(DeviceBlock(nbytes, device), device=device)


class _Driver:
    """Calls of the driver in a device's primary context, which PyTorch uses as well."""

    def __init__(self, index: int) -> None:
        # PyTorch says clearly why there is no device, where the driver has numbers.
        torch.cuda.init()
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    @staticmethod
    @cache
    def of(index: int) -> _Driver:
        """That of CUDA device ``index``."""
        return _Driver(index)

    def allocate(self, nbytes: int) -> int | None:
        """The address of new memory; None if there is no room."""
        address = ctypes.c_uint64()
        with self._current():
            status = self._library.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(nbytes))
        if status == _OUT_OF_MEMORY:
            return None
        self._check("cuMemAlloc", status)
        return address.value

    def free(self, address: int) -> None:
        """Gives memory back once the device is done with it."""
        with contextlib.suppress(DriverError), self._current():
            # Without the context, at the process's end, the memory has gone already.
            self._library.cuMemFree_v2(ctypes.c_uint64(address))

    @contextlib.contextmanager
    def _current(self) -> Iterator[None]:
        """The context is the calling thread's within the block."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status == _SUCCESS:
            return
        reason = ctypes.c_char_p()
        self._library.cuGetErrorString(status, ctypes.byref(reason))
        raise DriverError(f"{name}: {(reason.value or b'unknown').decode()} (CUresult {status})")
