"""Messages of one byte in place of the real ones: the same schedule with next to nothing moved.

What is received is made up: random numbers of the size of activations, so that kernels run as fast
as on real data. Losses mean nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from data_plane.buffer_pool import BufferPool, PooledBuffer, device_allocator
from data_plane.transport import Transfer
from data_plane.ucxx_connection import UcxxConnection

SIZE = 0.05
"""Standard deviation of the made-up numbers."""


@contextmanager
def one_byte_messages(device: torch.device) -> Iterator[None]:
    """In this process, connections send and receive one byte of every message. All processes of a
    job must do so, from before its first step on."""
    pool = BufferPool(device_allocator(device))
    made_up: set[int] = set()
    offer, put = UcxxConnection.offer, UcxxConnection.put

    def offer_byte(
        self: UcxxConnection, tag: int, buffer: PooledBuffer, deadline_seconds: float
    ) -> Transfer:
        if buffer.nbytes and buffer.tensor.data_ptr() not in made_up:
            made_up.add(buffer.tensor.data_ptr())
            whole = buffer.tensor[: buffer.nbytes // 2 * 2].view(torch.bfloat16)
            whole.normal_(std=SIZE)
        byte = pool.acquire(1)
        try:
            return offer(self, tag, byte, deadline_seconds)
        finally:
            byte.release()

    def put_byte(
        self: UcxxConnection,
        tag: int,
        buffer: PooledBuffer,
        deadline_seconds: float,
        ready: Callable[[], bool] | None = None,
    ) -> Transfer:
        byte = pool.acquire(1)
        try:
            return put(self, tag, byte, deadline_seconds, ready)
        finally:
            byte.release()

    with (
        mock.patch.object(UcxxConnection, "offer", offer_byte),
        mock.patch.object(UcxxConnection, "put", put_byte),
    ):
        yield
