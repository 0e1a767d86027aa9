"""Reusable, reference-counted byte buffers, so that a steady state allocates nothing.

Registering memory with a network and, on a GPU, allocating it at all cost far more than moving one
message. The pool hands out blocks by size class and takes them back when their last reference is
gone; a transport holds a reference for as long as the network can touch a block.
"""

from __future__ import annotations

import bisect
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from data_plane import device_memory
from data_plane.slab_allocator import SlabAllocator

if TYPE_CHECKING:
    from data_plane.transport import BufferAllocator

ALIGNMENT_BYTES = 256
"""Start of every buffer: what CUDA's vector loads and the kernels' tiles ask for."""

MOST_WASTE = 2
"""An idle block of up to so many times the size is taken before a new one is made: message sizes
change a little with every plan, and must not cost an allocation each time."""


class BufferPoolExhausted(RuntimeError):
    """The pool's limit leaves no room for a buffer, or the pool is closed; the message carries the
    numbers."""


class BufferReleased(RuntimeError):
    """A buffer was used or released after its last reference had gone."""


@dataclass(frozen=True, kw_only=True)
class PoolStats:
    """Memory of a pool at one moment.

    Attributes:
        in_use_bytes: memory behind buffers that somebody holds.
        idle_bytes: memory that waits to be used again.
        allocations: calls of the allocator so far; constant in a steady state.
    """

    in_use_bytes: int
    idle_bytes: int
    allocations: int


def host_allocator(nbytes: int) -> torch.Tensor:
    """Returns ``nbytes`` of pageable host memory, uninitialised: 1-D uint8."""
    return torch.empty(nbytes, dtype=torch.uint8)


def _closed_allocator(nbytes: int) -> torch.Tensor:
    raise BufferPoolExhausted(
        f"no buffer of {nbytes} bytes: the pool is closed; its session or node has ended"
    )


def device_allocator(device: str | torch.device, *, limited: bool = False) -> BufferAllocator:
    """Returns an allocator of memory on ``device``, for example ``"cuda:0"``, that other processes
    can be given.

    Args:
        device: where.
        limited: for a pool with a limit, which gives blocks back; otherwise they are cut from
            slabs.
    """
    target = torch.device(device)
    if target.type != "cuda":
        return lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device=target)

    def allocate(nbytes: int) -> torch.Tensor:
        return device_memory.allocate(nbytes, target)

    return allocate if limited else SlabAllocator(allocate)


def size_class_bytes(nbytes: int) -> int:
    """Rounds up to a quarter step between powers of two: at most 25% (below 1 KiB: 256 bytes) more.

    Raises:
        ValueError: ``nbytes`` is negative.
    """
    if nbytes < 0:
        raise ValueError(f"nbytes is {nbytes}; a buffer has 0 bytes or more")
    if nbytes <= ALIGNMENT_BYTES:
        return ALIGNMENT_BYTES
    power = 1 << ((nbytes - 1).bit_length() - 1)
    step = max(power // 4, ALIGNMENT_BYTES)
    return -(-nbytes // step) * step


class PooledBuffer:
    """A block of a pool, cut to ``nbytes``; starts with one reference. Thread-safe."""

    __slots__ = ("_block", "_pool", "_references", "_tensor", "nbytes")

    def __init__(self, pool: BufferPool, block: torch.Tensor, nbytes: int) -> None:
        self._pool = pool
        self._block: torch.Tensor | None = block
        self._tensor: torch.Tensor | None = block[:nbytes]
        self._references = 1
        self.nbytes = nbytes

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes: 1-D uint8 of exactly ``nbytes``, contiguous, 256-byte-aligned.

        Raises:
            BufferReleased: the last reference has gone.
        """
        if self._tensor is None:
            raise BufferReleased(
                f"buffer of {self.nbytes} bytes has gone back to its pool; keep a reference "
                "(retain) for as long as its bytes are needed"
            )
        return self._tensor

    @property
    def block(self) -> torch.Tensor:
        """The whole block behind it: what a network registers, once, and uses again for every
        buffer that the block is cut to. It lives for as long as the pool keeps it.

        Raises:
            BufferReleased: the last reference has gone.
        """
        if self._block is None:
            raise BufferReleased(f"buffer of {self.nbytes} bytes: its block has gone back")
        return self._block

    def retain(self) -> PooledBuffer:
        """Adds a reference and returns the buffer.

        Raises:
            BufferReleased: the last reference has gone.
        """
        with self._pool._lock:
            if self._references == 0:
                raise BufferReleased(f"buffer of {self.nbytes} bytes: retain after its release")
            self._references += 1
        return self

    def release(self) -> None:
        """Drops a reference; with the last one the memory returns to the pool.

        Raises:
            BufferReleased: there was no reference left.
        """
        with self._pool._lock:
            if self._references == 0:
                raise BufferReleased(
                    f"buffer of {self.nbytes} bytes was released more often than retained; "
                    "somebody else may hold its memory already"
                )
            self._references -= 1
            if self._references > 0 or self._block is None:
                return
            self._pool._take_back(self._block)
            self._block = self._tensor = None
        self._pool._tell_freed()

    def release_when(self, ready: Callable[[], bool] | None) -> None:
        """:meth:`release` as soon as ``ready()`` is True, for kernels that are launched and still
        use the bytes; None: now. The pool asks whenever somebody wants a buffer; whoever waits for
        one of a limited pool is not told."""
        if ready is None or ready():
            self.release()
        else:
            self._pool._release_later(self, ready)


class BufferPool:
    """Hands out buffers of any size from blocks by size class. Thread-safe.

    Args:
        allocator: makes the blocks; called outside the pool's lock.
        limit_bytes: most memory the pool may hold, idle blocks included; None for no limit.
    """

    def __init__(
        self, allocator: BufferAllocator = host_allocator, limit_bytes: int | None = None
    ) -> None:
        if limit_bytes is not None and limit_bytes < 0:
            raise ValueError(f"limit_bytes is {limit_bytes}; give 0 or more, or None for no limit")
        self._allocator = allocator
        self._closed = False
        # Whoever set a limit counts on what a buffer takes: not more than its class.
        self._most_waste = MOST_WASTE if limit_bytes is None else 1
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        # All blocks, idle or in use, by size class.
        self._made: Counter[int] = Counter()
        self._reserved: dict[Hashable, dict[Hashable, list[int]]] = {}
        self._in_use_bytes = 0
        self._idle_bytes = 0
        self._allocations = 0
        self._on_free: Callable[[], None] | None = None
        self._leaving: list[tuple[Callable[[], bool], PooledBuffer]] = []

    def on_free(self, callback: Callable[[], None]) -> None:
        """Has ``callback`` called whenever a buffer has come back, on the thread that released it;
        it must not block or raise. The last callback given counts."""
        self._on_free = callback

    @property
    def limit_bytes(self) -> int | None:
        """Most memory the pool may hold; None for no limit."""
        return self._limit_bytes

    def acquire(self, nbytes: int) -> PooledBuffer:
        """Returns a buffer of ``nbytes`` (0 is fine), uninitialised, with one reference.

        Raises:
            BufferPoolExhausted: it does not fit under ``limit_bytes``, or the pool is closed.
            ValueError: ``nbytes`` is negative.
        """
        block_bytes = size_class_bytes(nbytes)
        self._release_those_ready()
        with self._lock:
            block = self._take_idle(block_bytes)
            if block is not None:
                self._idle_bytes -= block.numel()
                self._in_use_bytes += block.numel()
                return PooledBuffer(self, block, nbytes)
            self._make_room(block_bytes, nbytes)
            self._count_new(block_bytes)
        return PooledBuffer(self, self._allocate(block_bytes), nbytes)

    def reserve(self, holder: Hashable, situations: Mapping[Any, Iterable[int]]) -> None:
        """Makes the blocks now that ``holder`` will need soon, so that :meth:`acquire` finds them
        there. Takes the place of what it reserved before; blocks that exist count, whoever uses
        them at the moment. Does nothing where it would not fit under ``limit_bytes``, or on a
        closed pool.

        Args:
            holder: any name. What several of them reserve for one situation is held together.
            situations: by situation, of which one comes after the other, sizes in bytes of all
                buffers that are held at a time.

        Raises:
            ValueError: a size is negative.
            torch.OutOfMemoryError, MemoryError: the device has no room; blocks made so far stay.
        """
        wanted = {name: [*map(size_class_bytes, sizes)] for name, sizes in situations.items()}
        with self._lock:
            if self._closed:
                return
            self._reserved[holder] = wanted
            missing = self._missing()
            held_bytes = self._held_bytes() + sum(missing)
            if self._limit_bytes is not None and held_bytes > self._limit_bytes:
                return
            for block_bytes in missing:
                self._count_new(block_bytes)
        for number, block_bytes in enumerate(missing):
            try:
                block = self._allocate(block_bytes)
            except BaseException:
                with self._lock:
                    for never_made in missing[number + 1 :]:
                        self._forget_new(never_made)
                raise
            with self._lock:
                self._take_back(block)

    def forget(self, holder: Hashable) -> None:
        """Drops what ``holder`` has reserved; the blocks stay. Idempotent."""
        with self._lock:
            self._reserved.pop(holder, None)

    def stats(self) -> PoolStats:
        """Returns the memory held now."""
        self._release_those_ready()
        with self._lock:
            return PoolStats(
                in_use_bytes=self._in_use_bytes,
                idle_bytes=self._idle_bytes,
                allocations=self._allocations,
            )

    def close(self) -> None:
        """Gives all memory back: idle blocks now, those in use as they are released. Hands out no
        more. Idempotent."""
        self._release_those_ready()
        with self._lock:
            # With it goes what is left of slabs.
            self._allocator = _closed_allocator
            self._closed = True
            self._reserved.clear()
            self._made.clear()
            self._idle.clear()
            self._idle_bytes = 0

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

    def _count_new(self, block_bytes: int) -> None:
        """A block is about to be made, for use. Needs the lock."""
        self._in_use_bytes += block_bytes
        self._made[block_bytes] += 1
        self._allocations += 1

    def _forget_new(self, block_bytes: int) -> None:
        """A block that was counted could not be made. Needs the lock."""
        self._in_use_bytes -= block_bytes
        self._made[block_bytes] -= 1

    def _missing(self) -> list[int]:
        """Size classes of the blocks to make for what is reserved, largest first. Needs the
        lock."""
        blocks = sorted(self._made.elements())
        missing: list[int] = []
        situations: defaultdict[Hashable, list[int]] = defaultdict(list)
        for wanted in self._reserved.values():
            for name, sizes in wanted.items():
                situations[name] += sizes
        # The largest first: its blocks may do for the others.
        for together in sorted(situations.values(), key=sum, reverse=True):
            free = sorted([*blocks, *missing])
            for block_bytes in sorted(together, reverse=True):
                place = bisect.bisect_left(free, block_bytes)
                if place < len(free) and free[place] <= self._most_waste * block_bytes:
                    del free[place]
                else:
                    missing.append(block_bytes)
        return sorted(missing, reverse=True)

    def _allocate(self, block_bytes: int) -> torch.Tensor:
        """Makes a block that was counted, or takes the count back."""
        try:
            return self._aligned(block_bytes)
        except BaseException:
            with self._lock:
                self._forget_new(block_bytes)
            raise

    def _aligned(self, block_bytes: int) -> torch.Tensor:
        memory = self._allocator(block_bytes + ALIGNMENT_BYTES)
        if memory.dtype != torch.uint8 or memory.dim() != 1 or not memory.is_contiguous():
            raise ValueError(
                f"allocator returned {memory.dtype} of shape {tuple(memory.shape)}; a pool needs "
                "contiguous 1-D uint8"
            )
        offset = -memory.data_ptr() % ALIGNMENT_BYTES
        return memory[offset : offset + block_bytes]

    def _take_idle(self, block_bytes: int) -> torch.Tensor | None:
        """An idle block that will do. Needs the lock."""
        if self._idle[block_bytes]:
            return self._idle[block_bytes].pop()
        most = self._most_waste * block_bytes
        larger = (c for c, blocks in self._idle.items() if blocks and block_bytes < c <= most)
        chosen = min(larger, default=0)
        return self._idle[chosen].pop() if chosen else None

    def _make_room(self, block_bytes: int, nbytes: int) -> None:
        """Frees idle blocks, largest first, until a new one fits. Needs the lock."""
        if self._limit_bytes is None:
            return
        for idle_class in sorted(self._idle, reverse=True):
            blocks = self._idle[idle_class]
            while blocks and self._held_bytes() + block_bytes > self._limit_bytes:
                blocks.pop()
                self._made[idle_class] -= 1
                self._idle_bytes -= idle_class
        if self._held_bytes() + block_bytes > self._limit_bytes:
            raise BufferPoolExhausted(
                f"no room for a buffer of {nbytes} bytes (block of {block_bytes}): "
                f"{self._in_use_bytes} bytes in use, limit_bytes={self._limit_bytes}; release "
                "buffers earlier or raise the limit"
            )

    def _tell_freed(self) -> None:
        if self._on_free is not None:
            self._on_free()

    def _held_bytes(self) -> int:
        return self._in_use_bytes + self._idle_bytes

    def _take_back(self, block: torch.Tensor) -> None:
        """Makes a block idle. Needs the lock."""
        block_bytes = block.numel()
        self._in_use_bytes -= block_bytes
        if not self._closed:
            self._idle[block_bytes].append(block)
            self._idle_bytes += block_bytes


def _released(buffer: PooledBuffer, ready: Callable[[], bool]) -> bool:
    if not ready():
        return False
    buffer.release()
    return True
