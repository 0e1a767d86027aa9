"""Device memory straight from the CUDA driver, for buffers that other processes read.

PyTorch's allocator may map its memory piece by piece (``expandable_segments:True``, which keeps
long-context steps from fragmenting it), and cuda_ipc cannot export such memory. Plain allocations
can always be exported and registered, whatever the allocator's settings are.

Where the driver offers fabric handles (an NVLink domain, and a channel of IMEX in this container),
blocks are mapped by one: so cuda_ipc reaches them from other hosts of the domain too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from ctypes import byref, c_int, c_size_t, c_uint64
from enum import IntEnum
from functools import cache
from typing import Any, Final

import torch

_SUCCESS: Final = 0
_OUT_OF_MEMORY: Final = 2
_READ_WRITE: Final = 3
_PINNED: Final = 1
_ON_DEVICE: Final = 1
_MINIMUM: Final = 0
_EXPORTED_BYTES: Final = 64

_RDMA_TO_MAPPED: Final = 110
_HAS_FABRIC: Final = 128
"""Device attributes of cuda.h."""

_SWITCH: Final = "UCX_CUDA_IPC_ENABLE_MNNVL"
"""UCX's own; where it is off, nothing would use fabric handles."""


class HandleKind(IntEnum):
    """The handle by which other processes map a block; numbers of cuda.h."""

    PLAIN = 0
    FILE_DESCRIPTOR = 1
    FABRIC = 8


class DriverError(RuntimeError):
    """A call of the CUDA driver failed.

    Attributes:
        status: its CUresult.
    """

    def __init__(self, name: str, reason: str, status: int) -> None:
        super().__init__(f"{name}: {reason} (CUresult {status})")
        self.status = status


class DeviceBlock:
    """Memory of a CUDA device; goes back to the driver with the last tensor over it.

    Going back waits until the device has done all its work, so it is for the end of a job or of a
    pool, not for the middle of a step.

    Args:
        nbytes: 1 or more.
        device: a CUDA device.
        kind: of its handle; None is the one that reaches farthest.
    """

    def __init__(self, nbytes: int, device: torch.device, kind: HandleKind | None = None) -> None:
        self._address = 0
        index = torch.cuda.current_device() if device.index is None else device.index
        self._driver = Driver.of(index)
        address = self._driver.allocate(nbytes, kind)
        if address is None:
            # What PyTorch keeps for later has room for what is needed now.
            torch.cuda.empty_cache()
            address = self._driver.allocate(nbytes, kind)
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
    """Returns ``nbytes`` (1 or more) of a CUDA device that other processes can map: 1-D uint8,
    uninitialised.

    Raises:
        torch.OutOfMemoryError, DriverError: the device has no room, or refuses.
    """
    return torch.as_tensor(DeviceBlock(nbytes, device), device=device)


class _Location(ctypes.Structure):
    _fields_ = (("kind", c_int), ("index", c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("kind", c_int),
        ("handle_kind", c_int),
        ("location", _Location),
        ("windows", ctypes.c_void_p),
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class Driver:
    """Calls of the driver in a device's primary context, which PyTorch uses as well.

    Attributes:
        fabric_obstacle: why blocks get no fabric handle; empty if they get one.
    """

    def __init__(self, index: int) -> None:
        # PyTorch says clearly why there is no device, where the driver has numbers.
        torch.cuda.init()
        self._library = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._device = c_int()
        self._check("cuDeviceGet", byref(self._device), c_int(index))
        self._check("cuDevicePrimaryCtxRetain", byref(self._context), self._device)
        self._location = _Location(_ON_DEVICE, index)
        self._mapped_bytes: dict[int, int] = {}
        self.fabric_obstacle = self._find_fabric_obstacle()

    @staticmethod
    @cache
    def of(index: int) -> Driver:
        """That of CUDA device ``index``."""
        return Driver(index)

    def allocate(self, nbytes: int, kind: HandleKind | None = None) -> int | None:
        """The address of new memory; None if there is no room. See ``DeviceBlock``."""
        if kind is None:
            # A smaller one would still take all of what is mapped at least.
            far = not self.fabric_obstacle and nbytes >= self._mapped(1, HandleKind.FABRIC)
            kind = HandleKind.FABRIC if far else HandleKind.PLAIN
        address = c_uint64()
        try:
            if kind is HandleKind.PLAIN:
                self._call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
                return address.value
            handle, size = c_uint64(), c_size_t(self._mapped(nbytes, kind))
            self._call("cuMemCreate", byref(handle), size, self._properties(kind), c_uint64())
            return self.map(handle, nbytes, kind)
        except DriverError as error:
            if error.status == _OUT_OF_MEMORY:
                return None
            raise

    def free(self, address: int) -> None:
        """Gives memory back once the device is done with it."""
        begin, size = c_uint64(address), c_size_t(self._mapped_bytes.pop(address, 0))
        # Without the context, at the process's end, the memory has gone already.
        with contextlib.suppress(DriverError):
            if size:
                self._call("cuCtxSynchronize")
                self._call("cuMemUnmap", begin, size)
                self._call("cuMemAddressFree", begin, size)
            else:
                self._call("cuMemFree_v2", begin)

    def exported(self, address: int, kind: HandleKind) -> bytes:
        """Exports the memory at ``address``: another process imports it by these bytes."""
        handle, exported = c_uint64(), ctypes.create_string_buffer(_EXPORTED_BYTES)
        self._call("cuMemRetainAllocationHandle", byref(handle), ctypes.c_void_p(address))
        try:
            self._call("cuMemExportToShareableHandle", exported, handle, c_int(kind), c_uint64())
        finally:
            self._call("cuMemRelease", handle)
        return exported.raw

    def imported(self, exported: bytes, kind: HandleKind) -> c_uint64:
        """The handle of memory that another process has exported."""
        handle, source = c_uint64(), ctypes.create_string_buffer(exported, _EXPORTED_BYTES)
        given: Any = source
        if kind is HandleKind.FILE_DESCRIPTOR:
            given = ctypes.c_void_p(c_int.from_buffer(source).value)
        self._call("cuMemImportFromShareableHandle", byref(handle), given, c_int(kind))
        return handle

    def map(self, handle: c_uint64, nbytes: int, kind: HandleKind) -> int:
        """Maps memory of ``nbytes`` by its handle, which is used up; returns the address, which
        :meth:`free` takes back."""
        address, size, none = c_uint64(), c_size_t(self._mapped(nbytes, kind)), c_uint64()
        try:
            self._call("cuMemAddressReserve", byref(address), size, none, none, none)
            self._call("cuMemMap", address, size, none, handle, none)
        finally:
            self._call("cuMemRelease", handle)
        access = _Access(self._location, _READ_WRITE)
        self._call("cuMemSetAccess", address, size, byref(access), c_size_t(1))
        self._mapped_bytes[address.value] = size.value
        return address.value

    def _find_fabric_obstacle(self) -> str:
        """Tries it: the driver may offer what this container is not allowed."""
        if os.environ.get(_SWITCH, "").lower() in ("n", "no", "off", "0"):
            return f"{_SWITCH} turns them off"
        if not self._attribute(_HAS_FABRIC):
            return "the GPU or its driver offers none"
        kind = HandleKind.FABRIC
        try:
            address = self.allocate(1, kind)
            if address is None:
                return "the GPU has no memory left to try one"
            try:
                self.free(self.map(self.imported(self.exported(address, kind), kind), 1, kind))
            finally:
                self.free(address)
        except DriverError as error:
            return f"{error}; a container needs a channel of IMEX"
        return ""

    def _mapped(self, nbytes: int, kind: HandleKind) -> int:
        """The bytes that a block of ``nbytes`` takes where it is mapped."""
        least = c_size_t()
        self._call(
            "cuMemGetAllocationGranularity", byref(least), self._properties(kind), c_int(_MINIMUM)
        )
        return -(-nbytes // least.value) * least.value

    def _properties(self, kind: HandleKind) -> Any:
        rdma = self._attribute(_RDMA_TO_MAPPED)
        return byref(
            _Properties(kind=_PINNED, handle_kind=kind, location=self._location, rdma=rdma)
        )

    def _attribute(self, number: int) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(number), self._device)
        return value.value

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls the driver; the context is the calling thread's meanwhile."""
        self._check("cuCtxPushCurrent_v2", self._context)
        try:
            self._check(name, *arguments)
        finally:
            self._check("cuCtxPopCurrent_v2", byref(ctypes.c_void_p()))

    def _check(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != _SUCCESS:
            reason = ctypes.c_char_p()
            self._library.cuGetErrorString(status, byref(reason))
            raise DriverError(name, (reason.value or b"unknown").decode(), status)
