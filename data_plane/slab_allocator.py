"""Blocks cut from slabs: a process maps a peer's memory once a slab, not once a block."""

from __future__ import annotations

import bisect
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from data_plane.transport import BufferAllocator

SLAB_BYTES: Final = 64 * 2**20
"""Of a slab, unless a block is larger."""


class SlabAllocator:
    """Cuts blocks out of slabs, so that few calls reach the allocator behind it, and a process that
    is sent a block for the first time has nearly always mapped its slab before. Thread-safe.

    A slab goes back when all its blocks have gone, and one that is not used up with the allocator;
    the room of a single block is not used again. So this is for pools that keep what they have.

    Args:
        make_slab: allocates a slab.
    """

    def __init__(self, make_slab: BufferAllocator) -> None:
        self._make_slab = make_slab
        self._lock = threading.Lock()
        # What is left of slabs, by size.
        self._rests: list[torch.Tensor] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes``, uninitialised."""
        with self._lock:
            at = bisect.bisect_left(self._rests, nbytes, key=len)
            if at < len(self._rests):
                free = self._rests.pop(at)
            else:
                free = self._make_slab(max(nbytes, SLAB_BYTES))
            if rest := len(free) - nbytes:
                bisect.insort(self._rests, free[-rest:], key=len)
            return free[:nbytes]
