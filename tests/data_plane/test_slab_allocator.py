"""Blocks cut from slabs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from data_plane.slab_allocator import SLAB_BYTES, SlabAllocator


class Slabs:
    """Makes slabs in host memory, and remembers how large."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8)


def test_blocks_of_a_slab_do_not_overlap() -> None:
    slabs = Slabs()
    allocator = SlabAllocator(slabs)
    blocks = [allocator(nbytes) for nbytes in (1000, 1, 5000, 256)]
    assert [len(block) for block in blocks] == [1000, 1, 5000, 256]
    for value, block in enumerate(blocks):
        block.fill_(value)
    assert all(bool((block == value).all()) for value, block in enumerate(blocks))
    assert slabs.sizes == [SLAB_BYTES]


def test_what_is_left_of_a_slab_is_used_later() -> None:
    slabs = Slabs()
    allocator = SlabAllocator(slabs)
    half, third = SLAB_BYTES // 2, SLAB_BYTES // 3
    for nbytes in (half, 8 * SLAB_BYTES, SLAB_BYTES - third, third, half):
        allocator(nbytes)
    assert slabs.sizes == [SLAB_BYTES, 8 * SLAB_BYTES, SLAB_BYTES]


def test_threads_get_blocks_of_their_own() -> None:
    allocator = SlabAllocator(Slabs())
    with ThreadPoolExecutor(8) as threads:
        blocks = list(threads.map(allocator, [100] * 1000))
    assert len({block.data_ptr() for block in blocks}) == len(blocks)
