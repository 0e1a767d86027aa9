"""Messages of one byte in place of the real ones: the same schedule with next to nothing moved.

What is received is made up: random numbers of the size of activations, so that kernels run as fast
as on real data. Losses mean nothing.

Kernels must not run on what real data never are, either: matrix products of NaN are a fifth faster.
A made-up log-sum-exp would make probabilities that add up to the number of keys instead of 1, and
gradients grow by that factor from layer to layer until they overflow; so it has a floor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from attention_node.cuda_order import launched_work
from core_attention.message_rows import MessageRows, message_rows
from core_attention.message_views import Tensors
from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.transport import Transfer
from data_plane.ucxx.connection import UcxxConnection
from trainer_client.step import exchanges

SIZE = 0.05
"""Standard deviation of the made-up numbers."""

LEAST_LSE = 10.0
"""About the logarithm of the keys that a query of the benchmarked documents sees."""


class _PlausibleRows:
    """Rows of an exchange whose log-sum-exp have a floor when they come in."""

    def __init__(self, rows: MessageRows) -> None:
        self._rows = rows
        self.pack = rows.pack

    def unpack(self, message: torch.Tensor, outputs: Tensors, gradients: Tensors) -> None:
        """See :class:`core_attention.message_rows.MessageRows`."""
        self._rows.unpack(message, outputs, gradients)
        if "lse" in outputs:
            outputs["lse"].clamp_(min=LEAST_LSE)


@contextmanager
def one_byte_messages(device: torch.device) -> Iterator[None]:
    """In this process, connections send and receive one byte of every message. All processes of a
    job must do so, from before its first step on."""
    pool = BufferPool.on_device(device)
    made_up: dict[int, int] = {}
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    offer, put = UcxxConnection.offer, UcxxConnection.put

    def make_up(buffer: PooledBuffer) -> None:
        buffer.tensor[: buffer.nbytes // 2 * 2].view(torch.bfloat16).normal_(std=SIZE)

    def offer_byte(
        self: UcxxConnection, tag: int, buffer: PooledBuffer, deadline_seconds: float
    ) -> Transfer:
        address = buffer.tensor.data_ptr()
        if buffer.nbytes > made_up.get(address, 0):
            # Memory that no earlier buffer had may hold anything, and readers wait for no stream.
            made_up[address] = buffer.nbytes
            with torch.cuda.stream(stream):
                make_up(buffer)
            if stream is not None:
                stream.synchronize()
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
        # What was packed stays here, and whatever is next received into this memory would be read
        # from it: float32 read as bfloat16 is now and then a NaN.
        make_up(buffer)
        written = launched_work(device)
        byte = pool.acquire(1)
        try:
            return put(self, tag, byte, deadline_seconds, written or ready)
        finally:
            byte.release()

    with (
        mock.patch.object(UcxxConnection, "offer", offer_byte),
        mock.patch.object(UcxxConnection, "put", put_byte),
        mock.patch.object(exchanges, "message_rows", lambda *of: _PlausibleRows(message_rows(*of))),
    ):
        yield
