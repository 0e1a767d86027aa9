"""Blocks cut from slabs: a process maps a peer's memory once a slab, not once a block."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from data_plane.transport import BufferAllocator

MIN_SLAB_BYTES: Final = 64 * 2**20
GROWTH: Final = 4
"""A slab has at least such a part of all before it: sizes follow the plans, and grow a little."""


class SlabAllocator:
    """Cuts blocks out of slabs, so that few calls reach the allocator behind it, and a process that
    is sent a block for the first time has nearly always mapped its slab before. Thread-safe.

    A slab goes back when all its blocks have gone; the room of a single one is not used again, so
    this is for pools that keep what they have.

    Args:
        make_slab: allocates a slab.
    """

    def __init__(self, make_slab: BufferAllocator) -> None:
        self._make_slab = make_slab
        self._lock = threading.Lock()
        self._rest: torch.Tensor | None = None
        self._made_bytes = 0

    def __call__(self, nbytes: int) -> torch.Tensor:
        """Returns ``nbytes``, uninitialised."""
        with self._lock:
            if self._rest is None or len(self._rest) < nbytes:
                slab_bytes = max(nbytes, MIN_SLAB_BYTES, self._made_bytes // GROWTH)
                self._rest = self._make_slab(slab_bytes)
                self._made_bytes += slab_bytes
            block, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            return block
