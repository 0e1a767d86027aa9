"""The buffer pool: sizes, references, limits, threads."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable

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
from tests.support.errors import refused


def noting(note: Callable[[torch.UntypedStorage], object]) -> Callable[[int], torch.Tensor]:
    """Makes memory, of which ``note`` hears."""

    def allocate(nbytes: int) -> torch.Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        note(memory.untyped_storage())
        return memory

    return allocate


@given(st.integers(0, 2**40))
def test_size_class_fits_and_wastes_little(nbytes: int) -> None:
    block = size_class_bytes(nbytes)
    assert nbytes <= block <= max(nbytes * 1.25, nbytes + ALIGNMENT_BYTES)
    assert size_class_bytes(block) == block
    assert block % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 100_003])
def test_tensor_has_the_size_asked_for_and_is_aligned(nbytes: int) -> None:
    tensor = BufferPool().acquire(nbytes).tensor
    assert (tensor.dtype, tensor.shape, tensor.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_memory_made_in_inference_mode_is_anybody_s() -> None:
    pool = BufferPool()
    with torch.inference_mode():
        pool.acquire(1000).release()
        pool.reserve("step", {"forward": [5000]})
    for nbytes in (1000, 5000):
        assert int(pool.acquire(nbytes).tensor.fill_(7).max()) == 7


def test_misaligned_allocator_is_corrected() -> None:
    pool = BufferPool(lambda nbytes: host_allocator(nbytes + 3)[3:])
    assert pool.acquire(1000).tensor.data_ptr() % ALIGNMENT_BYTES == 0


def test_allocator_of_the_wrong_type_is_refused() -> None:
    pool = BufferPool(lambda nbytes: torch.empty(nbytes, dtype=torch.int8))
    with refused():
        pool.acquire(10)
    assert pool.stats().in_use_bytes == 0


def test_memory_comes_back_with_the_last_reference() -> None:
    pool = BufferPool()
    buffer = pool.acquire(1000)
    where = buffer.tensor.data_ptr()
    buffer.retain().release()
    other = pool.acquire(1000)
    assert other.tensor.data_ptr() != where
    buffer.release()
    assert pool.acquire(900).tensor.data_ptr() == where
    assert pool.stats().allocations == 2


def test_use_after_release() -> None:
    with refused():
        BufferPool().acquire(-1)
    buffer = BufferPool().acquire(10)
    buffer.release()
    for use in (buffer.release, buffer.retain, lambda: buffer.tensor, lambda: buffer.slab):
        with pytest.raises(BufferReleased):
            use()


def test_a_closed_pool_keeps_no_memory_and_hands_out_none() -> None:
    made: list[weakref.ref[torch.UntypedStorage]] = []
    pool = BufferPool(noting(lambda memory: made.append(weakref.ref(memory))), slab_bytes=4096)
    held, idle, other = pool.acquire(1000), pool.acquire(2000), pool.acquire(4096)
    idle.release()
    other.release()
    pool.close()
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (1024, 0)
    assert made[0]() is not None, "the buffer in use lost its memory"
    assert made[1]() is None, "a slab that is idle stays behind"
    held.release()
    pool.close()
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 0)
    assert all(slab() is None for slab in made), "slabs stay behind"
    with pytest.raises(BufferPoolExhausted):
        pool.acquire(1000)
    assert pool.stats().in_use_bytes == 0


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


def test_memory_comes_to_what_is_held_at_a_time() -> None:
    """However sizes vary, as those of messages do with every plan."""
    draw = random.Random(0)
    pool = BufferPool()
    most = 400_000
    pool.reserve("us", {"forward": [most]})
    for _ in range(500):
        sizes, left = [], most
        while left > 20_000:
            sizes.append(draw.randrange(1_000, left - 4_000))
            left -= -(-sizes[-1] // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        held = [pool.acquire(nbytes) for nbytes in sizes]
        draw.shuffle(held)
        for buffer in held:
            buffer.release()
    assert pool.stats().allocations == 1


def test_sizes_that_grow_with_every_step_make_few_slabs() -> None:
    """Slabs do not go back, and one of just a message's size would never do for the next."""
    pool = BufferPool()
    for step in range(100):
        size = int(2**21 * 1.01**step)
        pool.reserve("us", {"forward": [size, size]})
        for buffer in [pool.acquire(size), pool.acquire(size)]:
            buffer.release()
    assert pool.stats().allocations <= 12
    assert pool.stats().idle_bytes < 6 * 2 * size


def test_slabs_that_are_being_made_are_in_use() -> None:
    """Whoever asks for room in a limited pool must not count on theirs."""
    seen: list[int] = []
    pool = BufferPool(noting(lambda _: seen.append(pool.stats().in_use_bytes)), limit_bytes=8192)
    freed: list[None] = []
    pool.on_free(lambda: freed.append(None))
    pool.reserve("us", {"forward": [4096, 2048]})
    assert seen[0] == 6144
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 6144)
    assert freed, "nobody tells those who waited meanwhile"


def test_slabs_have_the_least_size() -> None:
    sizes: list[int] = []
    pool = BufferPool(noting(lambda memory: sizes.append(memory.nbytes())), slab_bytes=2**20)
    buffers = [pool.acquire(nbytes) for nbytes in (1000, 300_000, 2**21, 5000)]
    assert sizes == [2**20 + ALIGNMENT_BYTES, 2**21 + ALIGNMENT_BYTES]
    assert len({buffer.slab.data_ptr() for buffer in buffers}) == 2


def test_the_slab_behind_a_buffer_stays_the_same() -> None:
    pool = BufferPool(slab_bytes=4096)
    buffer, neighbour = pool.acquire(1000), pool.acquire(1000)
    slab = buffer.slab
    assert neighbour.slab is slab
    assert slab.data_ptr() == buffer.tensor.data_ptr()
    buffer.release()
    assert pool.acquire(1010).slab is slab


def test_what_is_reserved_is_there() -> None:
    pool = BufferPool()
    sizes = [5000, 5000, 100, 70_000]
    together = 5120 + 5120 + 256 + 70_144
    pool.reserve("us", {"forward": sizes})
    assert pool.stats().allocations == 1
    assert together <= pool.stats().idle_bytes <= 1.13 * together
    held = [pool.acquire(nbytes) for nbytes in sizes]
    assert pool.stats().allocations == 1
    pool.acquire(20_000)
    assert pool.stats().allocations == 2
    assert held[0].tensor.numel() == 5000


def test_situations_share_memory_and_holders_do_not() -> None:
    pool = BufferPool(limit_bytes=2**20)
    pool.reserve("us", {"forward": [4096, 4096], "backward": [4096, 5120]})
    assert pool.stats().idle_bytes == 4096 + 4096 + 5120
    pool.reserve("them", {"backward": [4096]})
    assert pool.stats().allocations == 3
    pool.forget("us")
    pool.reserve("them", {"backward": [4096] * 3})
    assert pool.stats().allocations == 4


def test_memory_in_use_counts_for_what_is_reserved() -> None:
    """A plan comes while the step before still holds its messages."""
    pool = BufferPool()
    held = [pool.acquire(10_000) for _ in range(3)]
    pool.reserve("us", {"forward": [9_000, 7_000, 10_000]})
    assert pool.stats().allocations == 3, "there is enough, with room for gaps"
    for buffer in held:
        buffer.release()


def test_nothing_is_reserved_beyond_the_limit() -> None:
    pool = BufferPool(limit_bytes=8192)
    pool.reserve("us", {"forward": [4096, 4096, 256]})
    assert pool.stats().allocations == 0
    pool.reserve("us", {"forward": [4096, 2048]})
    assert pool.stats().idle_bytes == 6144
    held = pool.acquire(6000)
    with pytest.raises(BufferPoolExhausted):
        pool.acquire(4000)
    held.release()
    assert pool.acquire(4000).nbytes == 4000


def test_a_device_that_is_full_takes_the_rest_back() -> None:
    def allocate(nbytes: int) -> torch.Tensor:
        if nbytes < 2000:
            raise MemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    pool = BufferPool(allocate, limit_bytes=8192)
    with pytest.raises(MemoryError):
        pool.reserve("us", {"forward": [4096, 512, 256]})
    assert (pool.stats().in_use_bytes, pool.stats().idle_bytes) == (0, 4096)
    pool.reserve("us", {"forward": [4096]})
    assert pool.stats().idle_bytes == 4096
    assert pool.acquire(8192).nbytes == 8192, "what could not be made is still counted"


def test_memory_that_is_still_read_is_nobody_elses() -> None:
    pool = BufferPool()
    is_read = [False]
    buffer = pool.acquire(1000)
    where = buffer.tensor.data_ptr()
    buffer.release_when(lambda: is_read[0])
    assert pool.stats().in_use_bytes == 1024
    other = pool.acquire(1000)
    assert other.tensor.data_ptr() != where
    is_read[0] = True
    assert pool.acquire(1000).tensor.data_ptr() == where
    assert pool.stats().allocations == 2
