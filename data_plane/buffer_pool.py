"""Reusable, reference-counted byte buffers, so that a steady state allocates nothing.

Registering memory with a network and, on a GPU, allocating it at all cost far more than moving one
message. The pool cuts buffers from slabs that it keeps, and takes them back when their last
reference is gone; a transport holds a reference for as long as the network can touch a buffer.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from data_plane import device_memory
from data_plane.arena import Arena, Place

BufferAllocator: TypeAlias = Callable[[int], torch.Tensor]
"""Allocates so many bytes of memory behind a pool: of the host, or plain memory of a device."""

ALIGNMENT_BYTES: Final = 256
"""Start of every buffer: what CUDA's vector loads and the kernels' tiles ask for."""

DEVICE_SLAB_BYTES: Final = 64 * 2**20
"""The size of a slab on a device, unless a buffer is larger: few calls reach the driver, and a
process that is sent a buffer for the first time has nearly always mapped its slab before."""

_FRAGMENTED: Final = 8
"""The part of what is reserved, one in so many, that comes on top, since free memory lies in
pieces. In recorded steps of pipelines, whose messages differ most, a tenth was enough."""

_LARGE_BYTES: Final = 2**20
"""From this size on a slab for one buffer has room to spare."""


class BufferPoolExhausted(RuntimeError):
    """The pool's limit leaves no room for a buffer, or the pool is closed; the message carries the
    numbers."""


class BufferReleased(RuntimeError):
    """A buffer was used or released after its last reference had gone."""


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Memory of a pool at one moment.

    Attributes:
        in_use_bytes: memory behind buffers that somebody holds, and slabs that are being made.
        idle_bytes: memory that waits to be used again.
        allocations: calls of the allocator so far; constant in a steady state.
    """

    in_use_bytes: int
    idle_bytes: int
    allocations: int


def host_allocator(nbytes: int) -> torch.Tensor:
    """Returns ``nbytes`` of pageable host memory, uninitialised: 1-D uint8."""
    return torch.empty(nbytes, dtype=torch.uint8)


def _closed(nbytes: int) -> BufferPoolExhausted:
    return BufferPoolExhausted(
        f"no buffer of {nbytes} bytes: the pool is closed; its session or node has ended"
    )


def device_allocator(device: str | torch.device) -> BufferAllocator:
    """Returns an allocator of memory on ``device``, for example ``"cuda:0"``, that other processes
    can be given."""
    target = torch.device(device)
    if target.type != "cuda":
        return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=target)
    return lambda nbytes: device_memory.allocate(nbytes, target)


def size_class_bytes(nbytes: int) -> int:
    """Rounds up to a quarter step between powers of two, by at most 25% (256 bytes below 1 KiB)."""
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; a buffer has 0 bytes or more")
    if nbytes <= ALIGNMENT_BYTES:
        return ALIGNMENT_BYTES
    power = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(power // 4, ALIGNMENT_BYTES)
    return -(-nbytes // step) * step


class PooledBuffer:
    """``nbytes`` of a pool's memory; starts with one reference. Thread-safe."""

    __slots__ = ("_place", "_pool", "_references", "_tensor", "nbytes")

    def __init__(self, pool: BufferPool, place: Place, nbytes: int) -> None:
        self._pool = pool
        self._place: Place | None = place
        self._tensor: torch.Tensor | None = place.slab.memory[place.begin : place.begin + nbytes]
        self._references = 1
        self.nbytes = nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: 1-D uint8 of exactly ``nbytes``, contiguous, 256-byte-aligned."""
        if self._tensor is None:
            raise BufferReleased(
                f"buffer of {self.nbytes} bytes has gone back to its pool; keep a reference "
                "(retain) for as long as its bytes are needed"
            )
        return self._tensor

    @property
    def slab(self) -> torch.Tensor:
        """The memory that it was cut from, 1-D uint8: a network registers it once, and uses it for
        every buffer that is cut from it. It lives for as long as the pool keeps it."""
        if self._place is None:
            raise BufferReleased(f"buffer of {self.nbytes} bytes: its memory has gone back")
        return self._place.slab.memory

    def retain(self) -> PooledBuffer:
        """Adds a reference and returns the buffer."""
        with self._pool._lock:
            if self._references == 0:
                raise BufferReleased(f"buffer of {self.nbytes} bytes: retain after its release")
            self._references += 1
        return self

    def release(self) -> None:
        """Drops a reference; with the last one the memory returns to the pool."""
        with self._pool._lock:
            if self._references == 0:
                raise BufferReleased(
                    f"buffer of {self.nbytes} bytes was released more often than retained; "
                    "somebody else may hold its memory already"
                )
            self._references -= 1
            if self._references > 0 or self._place is None:
                return
            self._pool._take_back(self._place)
            self._place = self._tensor = None
        self._pool._tell_freed()

    def release_when(self, ready: Callable[[], bool] | None) -> None:
        """:meth:`release` as soon as ``ready()`` is True, for kernels that are launched and still
        use the bytes; None: now. The pool asks whenever somebody wants a buffer;
        nobody who waits for one of a limited pool is informed."""
        if ready is None or ready():
            self.release()
        else:
            self._pool._release_later(self, ready)


class BufferPool:
    """Hands out buffers of any size. Thread-safe.

    Without a limit buffers are cut from slabs, and lie side by side. With one, each has a slab of
    its own, of its size class, that goes back to make room for others: so a buffer is there as long
    as the limit leaves its class.

    Args:
        allocator: makes slabs; called outside the pool's lock.
        limit_bytes: most memory the pool may hold, idle memory included; None for no limit.
        slab_bytes: the least that is asked of the allocator, without a limit.

    Attributes:
        limit_bytes: as above.
    """

    def __init__(
        self,
        allocator: BufferAllocator = host_allocator,
        limit_bytes: int | None = None,
        *,
        slab_bytes: int = 0,
    ) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes}; give 0 or more, or None for no limit")
        self._allocator = allocator
        self._closed = False
        self.limit_bytes = limit_bytes
        self._slab_bytes = slab_bytes if limit_bytes is None else 0
        self._lock = threading.Lock()
        self._arena = Arena()
        self._reserved: dict[Hashable, dict[Hashable, list[int]]] = {}
        self._in_use_bytes = 0
        # Of slabs that the allocator is making.
        self._coming_bytes = 0
        self._allocations = 0
        self._on_free: Callable[[], None] | None = None
        self._leaving: list[tuple[Callable[[], bool], PooledBuffer]] = []

    @classmethod
    def on_device(cls, device: str | torch.device, limit_bytes: int | None = None) -> BufferPool:
        """A pool of memory on ``device``, as :func:`device_allocator` makes it."""
        slab_bytes = DEVICE_SLAB_BYTES if torch.device(device).type == "cuda" else 0
        return cls(device_allocator(device), limit_bytes, slab_bytes=slab_bytes)

    def on_free(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever a buffer has come back, on the thread that released it;
        it must not block or raise. The last callback given counts."""
        self._on_free = callback

    @property
    def room_bytes(self) -> int | None:
        """The bytes that buffers may take now, in size classes; None for no limit, 0 once it is
        closed."""
        if self.limit_bytes is None:
            return None
        return 0 if self._closed else self.limit_bytes - self.stats().in_use_bytes

    def acquire(self, nbytes: int) -> PooledBuffer:
        """Returns a buffer of ``nbytes`` (0 is fine), uninitialised, with one reference.

        Raises:
            BufferPoolExhausted: the limit leaves no room, or the pool is closed.
        """
        held_bytes = self._held_for(nbytes)
        self._release_those_ready()
        with self._lock:
            if self._closed:
                raise _closed(nbytes)
            place = self._take(held_bytes)
            if place is None:
                self._make_room(held_bytes, nbytes)
                slab_bytes = self._slab_for(held_bytes)
                self._coming_bytes += slab_bytes
        if place is None:
            slab = self._make_slab(slab_bytes)
            with self._lock:
                self._keep(slab)
                # At once: nobody else can have it.
                place = self._take(held_bytes)
        if place is None:
            raise _closed(nbytes)
        return PooledBuffer(self, place, nbytes)

    def reserve(self, holder: Hashable, situations: Mapping[Any, Iterable[int]]) -> None:
        """Makes the memory now that ``holder`` will need soon, so that :meth:`acquire` finds it
        there. Takes the place of what it reserved before; memory that exists counts, used or not.
        Does nothing where it would not fit under ``limit_bytes``, or on a closed pool.

        Args:
            holder: any name. What several of them reserve for one situation is held together.
            situations: by situation, of which one comes after the other, sizes in bytes of all
                buffers that are held at a time.

        Raises:
            torch.OutOfMemoryError, MemoryError: the device has no room.
        """
        wanted = {name: [*map(self._held_for, sizes)] for name, sizes in situations.items()}
        with self._lock:
            if self._closed:
                return
            self._reserved[holder] = wanted
            together: defaultdict[Hashable, list[int]] = defaultdict(list)
            for of_holder in self._reserved.values():
                for name, sizes in of_holder.items():
                    together[name] += sizes
            missing = self._missing(together.values())
            total_bytes = sum(missing)
            if (
                self.limit_bytes is not None
                and self._total_bytes() + total_bytes > self.limit_bytes
            ):
                return
            self._coming_bytes += total_bytes
        for number, slab_bytes in enumerate(missing):
            try:
                slab = self._make_slab(slab_bytes)
            except BaseException:
                with self._lock:
                    self._coming_bytes -= sum(missing[number + 1 :])
                raise
            with self._lock:
                self._keep(slab)
        if missing:
            # Whoever found no room meanwhile may have it now.
            self._tell_freed()

    def forget(self, holder: Hashable) -> None:
        """Drops what ``holder`` has reserved; the memory stays. Idempotent."""
        with self._lock:
            self._reserved.pop(holder, None)

    def stats(self) -> PoolStats:
        """Returns the memory held now."""
        self._release_those_ready()
        with self._lock:
            return PoolStats(
                in_use_bytes=self._in_use_bytes + self._coming_bytes,
                idle_bytes=self._arena.free_bytes,
                allocations=self._allocations,
            )

    def close(self) -> None:
        """Gives all memory back: what is idle now, slabs in use as the last of their buffers is
        released. Hands out no more. Idempotent."""
        self._release_those_ready()
        with self._lock:
            self._closed = True
            self._reserved.clear()
            self._arena = Arena()

    def _release_later(self, buffer: PooledBuffer, ready: Callable[[], bool]) -> None:
        with self._lock:
            self._leaving.append((ready, buffer))

    def _release_those_ready(self) -> None:
        if not self._leaving:
            return
        with self._lock:
            leaving, self._leaving = self._leaving, []
        # Outside the lock: a release takes it.
        waiting = [(ready, buffer) for ready, buffer in leaving if not _released(buffer, ready)]
        if waiting:
            with self._lock:
                self._leaving += waiting

    def _slab_for(self, held_bytes: int) -> int:
        """The bytes to ask of the allocator for a buffer that finds no room. Sizes may grow a
        little with every step, and slabs do not go back: so large ones have room to spare."""
        room_bytes = size_class_bytes(held_bytes) if held_bytes >= _LARGE_BYTES else held_bytes
        return max(room_bytes, self._slab_bytes)

    def _held_for(self, nbytes: int) -> int:
        """The bytes that a buffer of ``nbytes`` takes."""
        if self.limit_bytes is not None or nbytes < 0:
            return size_class_bytes(nbytes)
        return max(-(-nbytes // ALIGNMENT_BYTES), 1) * ALIGNMENT_BYTES

    def _take(self, held_bytes: int) -> Place | None:
        """Free memory that will do. Needs the lock."""
        place = self._arena.take(held_bytes, is_exact=self.limit_bytes is not None)
        if place is not None:
            self._in_use_bytes += held_bytes
        return place

    def _take_back(self, place: Place) -> None:
        """Makes memory idle. Needs the lock."""
        self._in_use_bytes -= place.nbytes
        if not self._closed:
            self._arena.give_back(place)

    def _missing(self, situations: Iterable[list[int]]) -> list[int]:
        """Sizes of the slabs to make for what is held in each of ``situations``. Needs the lock."""
        if self.limit_bytes is not None:
            most: Counter[int] = Counter()
            for sizes in situations:
                most |= Counter(sizes)
            return [*(most - self._arena.slab_sizes).elements()]
        together = max(situations, key=sum, default=[])
        most_bytes = sum(together)
        missing = most_bytes + most_bytes // _FRAGMENTED - self._total_bytes()
        # In less than the largest buffer it would not lie.
        return [max(missing, self._slab_for(max(together)))] if missing > 0 else []

    def _make_slab(self, slab_bytes: int) -> torch.Tensor:
        """Makes a slab that was counted as coming, or takes the count back."""
        try:
            return self._aligned(slab_bytes)
        except BaseException:
            with self._lock:
                self._coming_bytes -= slab_bytes
            raise

    def _keep(self, slab: torch.Tensor) -> None:
        """A slab that was coming is there. Needs the lock."""
        self._coming_bytes -= slab.numel()
        if not self._closed:
            self._allocations += 1
            self._arena.add(slab)

    def _aligned(self, slab_bytes: int) -> torch.Tensor:
        # Whoever asks first may be in inference mode, whose tensors nobody may write to after it.
        with torch.inference_mode(False):
            memory = self._allocator(slab_bytes + ALIGNMENT_BYTES)
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(
                f"allocator returned {memory.dtype} of shape {tuple(memory.shape)}; a pool needs "
                "contiguous 1-D uint8"
            )
        offset = -memory.data_ptr() % ALIGNMENT_BYTES
        return memory[offset : offset + slab_bytes]

    def _make_room(self, held_bytes: int, nbytes: int) -> None:
        """Gives idle slabs back, largest first, until a new one fits. Needs the lock."""
        if self.limit_bytes is None:
            return
        while self._total_bytes() + held_bytes > self.limit_bytes:
            if not self._arena.drop_largest():
                raise BufferPoolExhausted(
                    f"no room for a buffer of {nbytes} bytes (block of {held_bytes}): "
                    f"{self._in_use_bytes} bytes in use, limit_bytes={self.limit_bytes}; release "
                    "buffers earlier or raise the limit"
                )

    def _tell_freed(self) -> None:
        if self._on_free is not None:
            self._on_free()

    def _total_bytes(self) -> int:
        return self._arena.total_bytes + self._coming_bytes


def _released(buffer: PooledBuffer, ready: Callable[[], bool]) -> bool:
    if not ready():
        return False
    buffer.release()
    return True
