"""The buffer pool: sizes, references, limits, threads."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from data_plane.buffer_pool import (
    ALIGNMENT_BYTES,
    BufferPool,
    BufferPoolExhausted,
    BufferReleased,
    host_allocator,
    size_class_bytes,
)
from data_plane.slab_allocator import SlabAllocator


@given(st.integers(0, 2**40))
def test_size_class_fits_and_wastes_little(nbytes: int) -> None:
    block = size_class_bytes(nbytes)
    assert nbytes <= block <= max(nbytes * 1.25, nbytes + ALIGNMENT_BYTES)
    assert size_class_bytes(block) == block
    assert block % ALIGNMENT_BYTES == 0


def test_few_size_classes() -> None:
    assert len({size_class_bytes(nbytes) for nbytes in range(2**20)}) < 50


def test_negative_size() -> None:
    with pytest.raises(ValueError, match="-1"):
        BufferPool().acquire(-1)


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 100_003])
def test_tensor_has_the_size_asked_for_and_is_aligned(nbytes: int) -> None:
    tensor = BufferPool().acquire(nbytes).tensor
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_misaligned_allocator_is_corrected() -> None:
    pool = BufferPool(lambda nbytes: host_allocator(nbytes + 3)[3:])
    assert pool.acquire(1000).tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_allocator_of_the_wrong_type_is_refused() -> None:
    pool = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.int8))
    with pytest.raises(ValueError, match="int8"):
        pool.acquire(10)
    assert pool.stats().in_use_bytes == 0


def test_memory_comes_back_with_the_last_reference() -> None:
    pool = BufferPool()
    buffer = pool.acquire(1000)
    where = buffer.tensor.data_ptr()
    buffer.retain().release()
    assert pool.acquire(1000).tensor.data_ptr() != where
    buffer.release()
    assert pool.acquire(900).tensor.data_ptr() == where
    assert pool.stats().allocations == 2


def test_use_after_release() -> None:
    buffer = BufferPool().acquire(10)
    buffer.release()
    with pytest.raises(BufferReleased, match="more often"):
        buffer.release()
    with pytest.raises(BufferReleased, match="retain"):
        buffer.retain()
    with pytest.raises(BufferReleased, match="gone back"):
        _ = buffer.tensor


def test_stats() -> None:
    pool = BufferPool()
    buffer = pool.acquire(1000)
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (1024, 0)
    buffer.release()
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 1024)


def test_a_closed_pool_keeps_no_memory_and_hands_out_none() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []

    def allocate(nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        made.append(weakref.ref(memory.untyped_storage()))
        return memory

    pool = BufferPool(SlabAllocator(allocate))
    held, idle = pool.acquire(1000), pool.acquire(2000)
    idle.release()
    pool.close()
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (1024, 0)
    assert made[0]() is not None, "the buffer in use lost its memory"
    held.release()
    pool.close()
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 0)
    assert all(slab() is None for slab in made), "slabs stay behind"
    with pytest.raises(BufferPoolExhausted, match="closed"):
        pool.acquire(1000)
    assert pool.stats().in_use_bytes == 0


def test_limit_names_the_numbers() -> None:
    pool = BufferPool(limit_bytes=4096)
    held = pool.acquire(3000)
    with pytest.raises(BufferPoolExhausted, match=r"2000.*3072.*4096"):
        pool.acquire(2000)
    held.release()
    assert pool.acquire(2000).nbytes == 2000


def test_limit_frees_idle_memory_of_other_sizes_first() -> None:
    pool = BufferPool(limit_bytes=4096)
    for nbytes in (512, 1024, 2048):
        pool.acquire(nbytes).release()
    pool.acquire(4096)
    assert pool.stats().idle_bytes == 0


def test_threads_share_a_pool() -> None:
    pool = BufferPool()

    def churn() -> None:
        for round_number in range(300):
            buffer = pool.acquire(100 + round_number % 3 * 1000)
            buffer.retain()
            buffer.release()
            buffer.release()

    threads = [threading.Thread(target=churn) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert pool.stats().in_use_bytes == 0
    assert pool.stats().allocations <= 12


def test_a_somewhat_larger_block_is_used_again() -> None:
    """Message sizes change a little with every plan."""
    pool = BufferPool()
    pool.acquire(100_000).release()
    smaller = pool.acquire(60_000)
    assert (smaller.nbytes, smaller.tensor.numel()) == (60_000, 60_000)
    assert pool.stats().allocations == 1
    assert pool.stats().in_use_bytes == size_class_bytes(100_000)
    smaller.release()
    pool.acquire(20_000)
    assert pool.stats().allocations == 2
    assert pool.stats().idle_bytes == size_class_bytes(100_000)


def test_a_limited_pool_takes_no_more_than_it_says() -> None:
    pool = BufferPool(limit_bytes=2**20)
    pool.acquire(100_000).release()
    pool.acquire(60_000)
    assert pool.stats().in_use_bytes == size_class_bytes(60_000)


def test_the_block_behind_a_buffer_stays_the_same() -> None:
    pool = BufferPool()
    buffer = pool.acquire(1000)
    block = buffer.block
    assert block.data_ptr() == buffer.tensor.data_ptr()
    buffer.release()
    assert pool.acquire(1010).block is block
    with pytest.raises(BufferReleased):
        buffer.block  # noqa: B018


def test_what_is_reserved_is_there() -> None:
    pool = BufferPool()
    sizes = [5000, 5000, 100, 70_000]
    pool.reserve("us", {"forward": sizes})
    made = pool.stats().allocations
    assert pool.stats().idle_bytes == sum(map(size_class_bytes, sizes))
    held = [pool.acquire(nbytes) for nbytes in sizes]
    assert pool.stats().allocations == made
    pool.acquire(5000)
    assert pool.stats().allocations == made + 1
    assert held[0].tensor.numel() == 5000


def test_situations_share_memory_and_holders_do_not() -> None:
    pool = BufferPool()
    pool.reserve("us", {"forward": [4096, 4096], "backward": [4096, 5120]})
    assert pool.stats().idle_bytes == 4096 + 5120
    pool.reserve("them", {"backward": [4096]})
    assert pool.stats().idle_bytes == 4096 + 5120 + 4096
    pool.forget("us")
    pool.reserve("them", {"backward": [4096] * 3})
    assert pool.stats().allocations == 3


def test_blocks_in_use_count_for_what_is_reserved() -> None:
    """A plan comes while the step before still holds its messages."""
    pool = BufferPool()
    held = [pool.acquire(10_000) for _ in range(3)]
    pool.reserve("us", {"forward": [9_000, 8_000, 10_000]})
    assert pool.stats().allocations == 3
    for buffer in held:
        buffer.release()


def test_nothing_is_reserved_beyond_the_limit() -> None:
    pool = BufferPool(limit_bytes=8192)
    pool.reserve("us", {"forward": [4096, 4096, 256]})
    assert pool.stats().allocations == 0
    pool.reserve("us", {"forward": [4096, 2048]})
    assert pool.stats().idle_bytes == 6144


def test_a_device_that_is_full_takes_the_rest_back() -> None:
    def allocate(nbytes: int) -> torch.Tensor:
        if nbytes < 2000:
            raise MemoryError("full")
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = BufferPool(allocate)
    with pytest.raises(MemoryError, match="full"):
        pool.reserve("us", {"forward": [256, 512, 4096]})
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 4096)
    pool.reserve("us", {"forward": [4096]})
    assert pool.stats().idle_bytes == 4096


def test_memory_that_is_still_read_is_nobody_elses() -> None:
    pool = BufferPool()
    is_read = [False]
    buffer = pool.acquire(1000)
    block = buffer.block
    buffer.release_when(lambda: is_read[0])
    assert pool.stats().in_use_bytes == 1024
    assert pool.acquire(1000).block.data_ptr() != block.data_ptr()
    is_read[0] = True
    assert pool.acquire(1000).block.data_ptr() == block.data_ptr()
    assert pool.stats().allocations == 2


def test_memory_that_was_read_before_is_free_at_once() -> None:
    pool = BufferPool()
    pool.acquire(1000).release_when(lambda: True)
    assert pool.stats().idle_bytes == 1024
