"""Ranges of a few large slabs of memory, taken and given back; neighbours that are free become one.

Sizes of messages change with every plan. Memory that is cut each time comes to what is held at
a time, where blocks that keep their sizes come to the most of each size.
"""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False)
class Slab:
    """Memory from an allocator.

    Attributes:
        number: in which slabs were added to their arena.
        memory: 1-D uint8.
    """

    number: int
    memory: torch.Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """A range of a slab's bytes, half open."""

    slab: Slab
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Its length."""
        return self.end - self.begin


class Arena:
    """The free ranges of its slabs. Not thread-safe.

    Best fit: the smallest range that is large enough, of equal ones the first.

    Attributes:
        slab_sizes: how many slabs there are of each size.
        total_bytes: of all slabs.
        free_bytes: of all free ranges.
    """

    def __init__(self) -> None:
        self._n_slabs = 0
        self.slab_sizes: Counter[int] = Counter()
        self.total_bytes = 0
        self.free_bytes = 0
        # Free ranges, by length, and by where they begin and end.
        self._sizes: list[tuple[int, int, int]] = []
        self._from: dict[tuple[int, int], Place] = {}
        self._to: dict[tuple[int, int], Place] = {}

    def add(self, memory: torch.Tensor) -> None:
        """Adds a slab, all of it free: 1-D uint8, not empty."""
        slab = Slab(self._n_slabs, memory)
        self._n_slabs += 1
        self.slab_sizes[memory.numel()] += 1
        self.total_bytes += memory.numel()
        self._insert(Place(slab, 0, memory.numel()))

    def take(self, nbytes: int, *, is_exact: bool = False) -> Place | None:
        """Takes a range of ``nbytes`` (1 or more); None if none is large enough.

        Args:
            nbytes: its length.
            is_exact: only a free range of just this length will do; none is divided.
        """
        at = bisect.bisect_left(self._sizes, (nbytes, 0, 0))
        if at == len(self._sizes):
            return None
        length, number, begin = self._sizes[at]
        if is_exact and length != nbytes:
            return None
        free = self._from[number, begin]
        self._remove(free)
        if length > nbytes:
            self._insert(Place(free.slab, begin + nbytes, free.end))
        return Place(free.slab, begin, begin + nbytes)

    def give_back(self, place: Place) -> None:
        """Makes a range free that was taken."""
        slab, begin, end = place.slab, place.begin, place.end
        if before := self._to.get((slab.number, begin)):
            self._remove(before)
            begin = before.begin
        if after := self._from.get((slab.number, end)):
            self._remove(after)
            end = after.end
        self._insert(Place(slab, begin, end))

    def drop_largest(self) -> int:
        """Forgets the largest slab that is free as a whole; returns its bytes, 0 if there is
        none."""
        for length, number, begin in reversed(self._sizes):
            if length == self._from[number, begin].slab.memory.numel():
                self._remove(self._from[number, begin])
                self.slab_sizes[length] -= 1
                self.total_bytes -= length
                return length
        return 0

    def _insert(self, place: Place) -> None:
        number = place.slab.number
        bisect.insort(self._sizes, (place.nbytes, number, place.begin))
        self._from[number, place.begin] = self._to[number, place.end] = place
        self.free_bytes += place.nbytes

    def _remove(self, place: Place) -> None:
        number = place.slab.number
        del self._sizes[bisect.bisect_left(self._sizes, (place.nbytes, number, place.begin))]
        del self._from[number, place.begin], self._to[number, place.end]
        self.free_bytes -= place.nbytes
