"""Edge keys between ranks: keys and values of layers at home that lie on another rank, and their
gradients back.

Every rank knows from its plan which of its rows others need, and sends them, unasked, when it comes
to the layer. In the backward pass their gradients come back.

Two ranks have one connection, which the one with the higher number opens to the in-place server of
the other. It carries no ticks, so no recovery closes it. If it breaks, it is opened again, and both
send again what the other one lacks: messages are kept until every rank has finished their step.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import SystemRandom
from typing import Any

import torch

from attention_node.cuda_order import launched_work, record_event
from attention_node.hello import PROTOCOL_VERSION
from core_attention.ca_task import Phase
from core_attention.checksum import ChecksumMismatch, seal, verify
from core_attention.message import MessageLayout
from core_attention.message_views import message_views
from core_attention.tick import Tick, step_of_tag
from data_plane.buffer_pool import BufferPool, BufferReleased, PooledBuffer
from data_plane.liveness import LivenessMonitor
from data_plane.transport import (
    ConnectFailed,
    Connection,
    Transfer,
    TransferState,
    Transport,
    TransportError,
)
from distca.contract import rpc
from distca.v1 import data_plane_pb2
from trainer_client.errors import CoreAttentionFailed, SessionClosed
from trainer_client.link.control_link import ControlLink
from trainer_client.options import SessionOptions
from trainer_client.step.replies import Tensors

logger = logging.getLogger(__name__)

_ATTEMPT_SECONDS = 2.0
_LONGEST_PAUSE_SECONDS = 1.0
_CHECK_SECONDS = 0.25
"""How often a wait looks whether the job has ended."""
_GREETED_CHECK_SECONDS = 0.0002
_MOST_CONNECTING = 8
_MOST_TAGS = 4096
"""That a hello or its answer names, the newest, since both have a limit in bytes. A message that is
sent again for want of that waits for nobody, and is dropped."""


@dataclass(frozen=True)
class EdgeMessage:
    """A message between two ranks.

    Attributes:
        rank: the other one.
        tick: which call of layers at home (in the place of a layer), which nano-batch's queries,
            and whether it is keys (forward) or their gradients.
        is_carried: whether keys are of the nano-batch before that of the queries.
    """

    rank: int
    tick: Tick
    is_carried: bool

    @property
    def tag(self) -> int:
        """On connections that carry no ticks. A tick has two tags, and a call two messages of keys
        at most from one rank to another."""
        return self.tick.tag(reply=self.is_carried)

    def __str__(self) -> str:
        what = "keys" if self.tick.phase is Phase.FORWARD else "gradients of keys"
        return (
            f"step {self.tick.step} nano-batch {self.tick.nano_batch}: {what} from rank "
            f"{self.rank}, of layer {self.tick.layer} of those at home"
        )


@dataclass(eq=False)
class _KeptMessage:
    """A message that may have to be sent again.

    Attributes:
        written: after which the device has written it; None on a CPU.
    """

    buffer: PooledBuffer
    written: torch.cuda.Event | None


@dataclass(eq=False)
class _Neighbour:
    """Another rank.

    Attributes:
        connection: to it, or the last one.
        kept: by tag, what it may lack.
        received: tags of its messages that are here.
        connecting: whether a thread opens a connection.
        fault: what went wrong last.
    """

    connection: Connection | None = None
    kept: dict[int, _KeptMessage] = field(default_factory=dict)
    received: set[int] = field(default_factory=set)
    connecting: bool = False
    fault: str = ""

    @property
    def is_connected(self) -> bool:
        return self.connection is not None and not self.connection.closed

    @property
    def received_tags(self) -> list[int]:
        return sorted(self.received)[-_MOST_TAGS:]


class Neighbours:
    """The ranks that this one exchanges edge keys with. Thread-safe.

    Args:
        options: of the session.
        link: to the control plane.
        transport: connects.
        pool: message buffers.
        liveness: finds ranks that are stopped or cut off while they owe something.
    """

    def __init__(
        self,
        options: SessionOptions,
        link: ControlLink,
        transport: Transport,
        pool: BufferPool,
        liveness: LivenessMonitor,
    ) -> None:
        self._options = options
        self._link = link
        self._transport = transport
        self._pool = pool
        self._liveness = liveness
        self._device = torch.device(options.device)
        self._deadline_seconds = options.tick_timeout_seconds
        self._changed = threading.Condition()
        self._neighbours: dict[int, _Neighbour] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(_MOST_CONNECTING, thread_name_prefix="distca-edges")

    def send(self, message: EdgeMessage, layout: MessageLayout, tensors: Tensors) -> None:
        """Sends rows; returns at once.

        Args:
            message: what they are.
            layout: of the message.
            tensors: by section of ``layout``.
        """
        buffer = self._pool.acquire(layout.nbytes)
        for name, section in message_views(buffer.tensor, layout).items():
            section.copy_(tensors[name])
        kept = _KeptMessage(buffer, record_event(self._device))
        with self._changed:
            neighbour = self._of(message.rank)
            neighbour.kept[message.tag] = kept
            connection = neighbour.connection
            self._see_to(message.rank)
        if connection is not None:
            # One that has broken takes it, and does nothing.
            self._put(connection, message.tag, kept)

    def take(self, message: EdgeMessage, layout: MessageLayout) -> Tensors:
        """Waits for rows; on a GPU, for their sender to have computed them.

        Args:
            message: what they are.
            layout: of the message.

        Returns:
            By section of ``layout``, tensors of their own.
        """
        deadline = time.monotonic() + self._deadline_seconds
        while True:
            self._link.check()
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise self._late(message)
            connection = self._connection(message.rank)
            if connection is None:
                continue
            buffer = self._pool.acquire(layout.nbytes)
            try:
                transfer = connection.offer(message.tag, buffer, remaining_seconds)
                self._await(connection, transfer)
                if self._seals(connection):
                    verify(buffer.tensor, message.tag, connection.receiving_key)
                views = message_views(buffer.tensor, layout)
                tensors = {name: section.clone() for name, section in views.items()}
            except (TransportError, ChecksumMismatch) as error:
                # It is sent again on the next one.
                connection.close(f"{message}: {error}")
                self._of(message.rank).fault = str(error)
                continue
            finally:
                buffer.release_when(launched_work(self._device))
            with self._changed:
                self._of(message.rank).received.add(message.tag)
            return tensors

    def let_go(self, message: EdgeMessage) -> None:
        """Keeps ``message`` no longer: the other rank has answered it."""
        with self._changed:
            kept = self._of(message.rank).kept.pop(message.tag, None)
        if kept is not None:
            kept.buffer.release()

    def accept(self, rank: int, received: Sequence[int], connection: Connection) -> list[int]:
        """Another rank has connected, on the transport's thread.

        Args:
            rank: which one.
            received: tags of messages that it has from an earlier connection.
            connection: from it.

        Returns:
            Tags of its messages that are here.
        """
        with self._changed:
            answer = self._of(rank).received_tags
        self._run(self._take_up, rank, connection, received)
        return answer

    def forget(self, is_finished: Callable[[int], bool]) -> None:
        """Lets go of what belongs to steps that every rank has finished.

        Args:
            is_finished: of a step's number.
        """
        gone: list[_KeptMessage] = []
        with self._changed:
            for neighbour in self._neighbours.values():
                for tag in [t for t in neighbour.kept if is_finished(step_of_tag(t))]:
                    gone.append(neighbour.kept.pop(tag))
                neighbour.received = {
                    tag for tag in neighbour.received if not is_finished(step_of_tag(tag))
                }
        for kept in gone:
            kept.buffer.release()

    def close(self, why: str, *, finished: bool = False) -> None:
        """Closes all connections, at the end of the job if ``finished``. Idempotent."""
        with self._changed:
            self._closed = True
            neighbours, self._neighbours = list(self._neighbours.values()), {}
            self._changed.notify_all()
        self._threads.shutdown(wait=False, cancel_futures=True)
        for neighbour in neighbours:
            if neighbour.connection is not None:
                neighbour.connection.close(why, finished=finished)
            for kept in neighbour.kept.values():
                kept.buffer.release()

    def _of(self, rank: int) -> _Neighbour:
        return self._neighbours.setdefault(rank, _Neighbour())

    def _connection(self, rank: int) -> Connection | None:
        """To ``rank``, if there is one within a moment."""
        with self._changed:
            neighbour = self._of(rank)
            self._see_to(rank)
            self._changed.wait_for(lambda: neighbour.is_connected, _CHECK_SECONDS)
            return neighbour.connection if neighbour.is_connected else None

    def _await(self, connection: Connection, transfer: Transfer) -> None:
        """Raises TransportError, or SessionClosed."""
        self._liveness.watch_until_end(connection, transfer, self._options.rank_ping_seconds)
        while transfer.state is TransferState.PENDING:
            try:
                transfer.wait(_CHECK_SECONDS)
            except TransportError:
                if transfer.state is not TransferState.PENDING:
                    raise
            self._link.check()
        if transfer.error is not None:
            raise transfer.error

    def _see_to(self, rank: int) -> None:
        """Has a thread connect, if it is for this side to do. Needs the lock."""
        neighbour = self._of(rank)
        if rank < self._options.rank and not (
            neighbour.is_connected or neighbour.connecting or self._closed
        ):
            neighbour.connecting = True
            self._run(self._connect, rank)

    def _run(self, function: Callable[..., None], *args: Any) -> None:
        """On a thread of this object's, unless it is closed."""

        def run() -> None:
            try:
                function(*args)
            except Exception:
                logger.exception("rows between ranks: %s failed", function.__name__)

        with contextlib.suppress(RuntimeError):
            self._threads.submit(run)

    def _connect(self, rank: int) -> None:
        """Connects to a lower rank; tries for as long as a tick may take."""
        deadline = time.monotonic() + self._deadline_seconds
        try:
            while not self._closed and time.monotonic() < deadline:
                try:
                    self._link.check()
                    self._try_to_connect(rank)
                    return
                except SessionClosed:
                    return
                except (TransportError, rpc.RpcError) as error:
                    with self._changed:
                        self._of(rank).fault = str(error)
                    time.sleep(SystemRandom().uniform(0.0, _LONGEST_PAUSE_SECONDS))
        finally:
            with self._changed:
                self._of(rank).connecting = False
                self._changed.notify_all()

    def _try_to_connect(self, rank: int) -> None:
        """Raises TransportError or RpcError."""
        located = self._link.locate(rank)
        if located is None:
            raise ConnectFailed(
                "the rank has not joined the job, or is away",
                transport=self._transport.name,
                peer=f"rank {rank}",
            )
        server_id, address = located
        with self._changed:
            received = self._of(rank).received_tags
        hello = data_plane_pb2.Hello(
            version=PROTOCOL_VERSION,
            job_id=self._link.job_id,
            rank=self._options.rank,
            server_id=server_id,
            edge_keys=True,
            received_tags=received,
        ).SerializeToString()
        connection, answer = self._transport.connect(
            address, hello, _ATTEMPT_SECONDS, secret=self._link.token
        )
        connection.show_as(server_id)
        welcome = data_plane_pb2.Welcome.FromString(answer)
        self._take_up(rank, connection, welcome.received_tags)

    def _take_up(self, rank: int, connection: Connection, received: Sequence[int]) -> None:
        """Uses a new connection, and sends on it what the other side lacks."""
        has = frozenset(received)
        with self._changed:
            if self._closed:
                connection.close("the session is closed")
                return
            neighbour = self._of(rank)
            old, neighbour.connection = neighbour.connection, connection
            lacking = [(tag, kept) for tag, kept in neighbour.kept.items() if tag not in has]
            self._changed.notify_all()
        if old is not None:
            old.close("there is a newer connection")
        connection.add_closed_callback(lambda error: self._gone(rank, connection, error))
        for tag, kept in lacking:
            self._put(connection, tag, kept)

    def _gone(self, rank: int, connection: Connection, error: TransportError | None) -> None:
        """A connection has ended. If the other side may lack something, there must be another."""
        with self._changed:
            neighbour = self._of(rank)
            if self._closed or neighbour.connection is not connection:
                return
            neighbour.fault = str(error or "")
            if neighbour.kept:
                self._see_to(rank)

    def _put(self, connection: Connection, tag: int, kept: _KeptMessage) -> None:
        try:
            buffer = kept.buffer.retain()
        except BufferReleased:
            return  # Its step is over.
        ready = None if kept.written is None else kept.written.query
        try:
            # Keys are there once the handshake is over, and with them whether it seals.
            while not (connection.closed or connection.sending_key):
                time.sleep(_GREETED_CHECK_SECONDS)
            if connection.closed:
                return
            if self._seals(connection):
                if kept.written is not None:
                    # The stream of this thread may be another than that which writes the rows.
                    torch.cuda.current_stream(self._device).wait_event(kept.written)
                seal(buffer.tensor, tag, connection.sending_key)
                ready = launched_work(self._device)
            connection.put(tag, buffer, self._deadline_seconds, ready=ready)
        finally:
            buffer.release_when(ready)

    def _seals(self, connection: Connection) -> bool:
        return self._options.seals(leaves_host=connection.leaves_host)

    def _late(self, message: EdgeMessage) -> CoreAttentionFailed:
        fault = self._of(message.rank).fault
        return CoreAttentionFailed(
            f"{message} did not come within tick_timeout_seconds {self._deadline_seconds:g}"
            + (f"; last: {fault}" if fault else "; the rank has not come to the layer")
            + f"; this machine must reach data_host of rank {message.rank}"
        )
