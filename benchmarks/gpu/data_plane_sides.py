"""One process's side of each library that the data plane is compared with.

All sides do the same: post receives, send, and wait for single messages. Messages are told apart by
a key that is unique for each pair of processes and direction.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.transport import Address, Claim, Connection, Transfer
from data_plane.transports import open_transport

WAIT_SECONDS = 60.0
_SECRET = b"benchmark"

Place = tuple[int, int]
"""(peer, key)."""

Buffers = Mapping[Place, PooledBuffer]


class Side(Protocol):
    """What the benchmark asks of a library."""

    def expose(self, receives: Buffers) -> None:
        """Makes the buffers known that will be received into; collective."""

    def receive(self, place: Place) -> None:
        """Posts a receive into an exposed buffer."""

    def send(
        self, place: Place, buffer: PooledBuffer, ready: Callable[[], bool] | None = None
    ) -> None:
        """Sends ``buffer`` once it is ready; the receiver uses this rank and the key."""

    def wait_received(self, place: Place) -> None:
        """Returns when the message is here."""

    def wait_sent(self) -> None:
        """Returns when everything that was sent may be overwritten."""

    def close(self) -> None:
        """Ends it."""


class AdapterSide:
    """A transport of the data plane.

    Args:
        name: which.
        rank, n_ranks: of this process.
    """

    def __init__(self, name: str, rank: int, n_ranks: int) -> None:
        self._transport = open_transport(name, device=f"cuda:{rank}", one_host=True)
        self._rank = rank
        self._connections: dict[int, Connection] = {}
        self._receives: Buffers = {}
        self._receiving: dict[Place, Transfer] = {}
        self._sending: list[Transfer] = []
        self._connect(n_ranks)

    def expose(self, receives: Buffers) -> None:
        self._receives = receives

    def receive(self, place: Place) -> None:
        peer, key = place
        buffer = self._receives[place]
        self._receiving[place] = self._connections[peer].offer(key, buffer, WAIT_SECONDS)

    def send(
        self, place: Place, buffer: PooledBuffer, ready: Callable[[], bool] | None = None
    ) -> None:
        peer, key = place
        self._sending.append(self._connections[peer].put(key, buffer, WAIT_SECONDS, ready=ready))

    def wait_received(self, place: Place) -> None:
        self._receiving.pop(place).wait(WAIT_SECONDS)

    def wait_sent(self) -> None:
        for transfer in self._sending:
            transfer.wait(WAIT_SECONDS)
        self._sending.clear()

    def close(self) -> None:
        self._transport.close()

    def _connect(self, n_ranks: int) -> None:
        """Every rank connects to those below it."""

        def accept(claim: Claim, connection: Connection) -> bytes:
            claim.check(_SECRET)
            self._connections[claim.hello[0]] = connection
            return b""

        address = self._transport.listen("127.0.0.1", 0, accept)
        ports = gather(address.port)
        for peer in range(self._rank):
            where = Address("127.0.0.1", ports[peer])
            hello = bytes([self._rank])
            self._connections[peer] = self._transport.connect(
                where, hello, WAIT_SECONDS, secret=_SECRET
            )[0]
        deadline = time.monotonic() + WAIT_SECONDS
        while len(self._connections) < n_ranks - 1:
            if time.monotonic() > deadline:
                raise TimeoutError("the other ranks did not connect")
            time.sleep(0.001)


class RawUcxxSide:
    """Bare ucxx, polled by the calling thread."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        from ucxx._lib import libucxx

        from data_plane.ucxx.connection import as_ucxx_array
        from data_plane.ucxx.settings import UcxxSettings

        self._ucx: Any = libucxx
        self._array = as_ucxx_array
        self._rank = rank
        options = UcxxSettings(device=f"cuda:{rank}", one_host=True).context_options()
        feature = libucxx.Feature
        context = libucxx.UCXContext(options, (feature.TAG, feature.STREAM, feature.WAKEUP))
        self._worker = libucxx.UCXWorker(context)
        self._requests: list[int] = []
        self._listener = libucxx.UCXListener.create(self._worker, 0, self._requests.append)
        self._endpoints: dict[int, Any] = {}
        self._receives: Buffers = {}
        self._receiving: dict[Place, Any] = {}
        self._sending: list[Any] = []
        self._connect(n_ranks)

    def expose(self, receives: Buffers) -> None:
        self._receives = receives

    def receive(self, place: Place) -> None:
        peer, key = place
        tag = self._ucx.UCXXTag(peer << 32 | key)
        array = self._array(self._receives[place].tensor)
        mask = self._ucx.UCXXTagMaskFull
        self._receiving[place] = self._endpoints[peer].tag_recv(array, tag, mask)

    def send(
        self, place: Place, buffer: PooledBuffer, ready: Callable[[], bool] | None = None
    ) -> None:
        peer, key = place
        tag = self._ucx.UCXXTag(self._rank << 32 | key)
        self._sending.append(self._endpoints[peer].tag_send(self._array(buffer.tensor), tag))

    def wait_received(self, place: Place) -> None:
        self._finish([self._receiving.pop(place)])

    def wait_sent(self) -> None:
        self._finish(self._sending)
        self._sending.clear()

    def close(self) -> None:
        dist.barrier(group=host_group())
        self._endpoints.clear()

    def _finish(self, requests: list[Any]) -> None:
        self._progress_until(lambda: all(request.completed for request in requests))
        for request in requests:
            request.check_error()

    def _progress_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            self._worker.progress()
            if time.monotonic() > deadline:
                raise TimeoutError("bare ucxx made no progress")

    def _connect(self, n_ranks: int) -> None:
        ports = gather(int(self._listener.port))
        for low in range(n_ranks):
            for high in range(low + 1, n_ranks):
                if self._rank == high:
                    create = self._ucx.UCXEndpoint.create
                    self._endpoints[low] = create(self._worker, "127.0.0.1", ports[low], True)
                if self._rank == low:
                    self._progress_until(lambda: bool(self._requests))
                    request = self._requests.pop()
                    accept = self._listener.create_endpoint_from_conn_request
                    self._endpoints[high] = accept(request, True)
                if self._rank in (low, high):
                    self._say_hello(low + high - self._rank)
                dist.barrier(group=host_group())

    def _say_hello(self, peer: int) -> None:
        """The first messages, which choose the lanes."""
        pool = BufferPool()
        key = 2**31
        self._receives = {(peer, key): pool.acquire(1)}
        self.receive((peer, key))
        self.send((peer, key), pool.acquire(1))
        self.wait_received((peer, key))
        self.wait_sent()


class RawNixlSide:
    """Bare nixl, polled by the calling thread: writes with notifications."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        from data_plane.nixl.agent import import_nixl

        library = import_nixl()
        config = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        self._agent: Any = library.nixl_agent(f"raw-{rank}", config)
        self._rank, self._n_ranks = rank, n_ranks
        self._registered: set[int] = set()
        self._remote: dict[Place, tuple[int, int]] = {}
        self._arrived: set[Place] = set()
        self._sending: list[Any] = []

    def expose(self, receives: Buffers) -> None:
        mine = {
            place: (buffer.tensor.data_ptr(), buffer.nbytes) for place, buffer in receives.items()
        }
        for buffer in receives.values():
            self._register(buffer)
        for peer, (addresses, metadata) in enumerate(
            gather((mine, self._agent.get_agent_metadata()))
        ):
            if peer == self._rank:
                continue
            self._agent.add_remote_agent(metadata)
            for (rank, key), where in addresses.items():
                if rank == self._rank:
                    self._remote[peer, key] = where

    def receive(self, place: Place) -> None:
        """One-sided: nothing to post."""

    def send(
        self, place: Place, buffer: PooledBuffer, ready: Callable[[], bool] | None = None
    ) -> None:
        peer, key = place
        self._register(buffer)
        address, nbytes = self._remote[place]
        descriptors = [
            self._agent.get_xfer_descs([where], "VRAM")
            for where in (
                (buffer.tensor.data_ptr(), nbytes, self._rank),
                (address, nbytes, peer),
            )
        ]
        handle = self._agent.initialize_xfer(
            "WRITE", *descriptors, f"raw-{peer}", f"{self._rank} {key}".encode()
        )
        if self._agent.transfer(handle) != "DONE":
            self._sending.append(handle)

    def wait_received(self, place: Place) -> None:
        self._progress_until(lambda: place in self._arrived)
        self._arrived.remove(place)

    def wait_sent(self) -> None:
        self._progress_until(lambda: not self._sending)

    def close(self) -> None:
        dist.barrier(group=host_group())

    def _register(self, buffer: PooledBuffer) -> None:
        if buffer.slab.data_ptr() not in self._registered:
            self._registered.add(buffer.slab.data_ptr())
            self._agent.register_memory([buffer.slab])

    def _progress_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            check = self._agent.check_xfer_state
            self._sending = [handle for handle in self._sending if check(handle) != "DONE"]
            for messages in self._agent.get_new_notifs().values():
                for message in messages:
                    peer, key = message.split()
                    self._arrived.add((int(peer), int(key)))
            if time.monotonic() > deadline:
                raise TimeoutError("bare nixl made no progress")


class NcclSide:
    """Sends and receives of ``torch.distributed`` with NCCL, grouped as all are posted."""

    def __init__(self, rank: int, n_ranks: int) -> None:
        self._operations: list[dist.P2POp] = []
        self._receives: Buffers = {}

    def expose(self, receives: Buffers) -> None:
        self._receives = receives

    def receive(self, place: Place) -> None:
        operation = dist.P2POp(dist.irecv, self._receives[place].tensor, place[0])
        self._operations.append(operation)

    def send(
        self, place: Place, buffer: PooledBuffer, ready: Callable[[], bool] | None = None
    ) -> None:
        self._operations.append(dist.P2POp(dist.isend, buffer.tensor, place[0]))

    def wait_received(self, place: Place) -> None:
        self.wait_sent()

    def wait_sent(self) -> None:
        operations, self._operations = self._operations, []
        if operations:
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            torch.cuda.synchronize()

    def close(self) -> None:
        """The process group ends it."""


def gather(value: Any) -> list[Any]:
    """What every rank gives, by rank; over the host."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=host_group())
    return values


_HOST_GROUPS: list[Any] = []


def host_group() -> Any:
    """A group of all ranks that does not touch GPUs."""
    if not _HOST_GROUPS:
        _HOST_GROUPS.append(dist.new_group(backend="gloo"))
    return _HOST_GROUPS[0]


SIDES: Mapping[str, Callable[[int, int], Side]] = {
    "raw ucxx": RawUcxxSide,
    "ucxx": lambda rank, n_ranks: AdapterSide("ucxx", rank, n_ranks),
    "raw nixl": RawNixlSide,
    "nixl": lambda rank, n_ranks: AdapterSide("nixl", rank, n_ranks),
    "NCCL": NcclSide,
}
