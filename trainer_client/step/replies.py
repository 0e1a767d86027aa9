"""Sending a tick's requests, and the replies that are awaited for them.

A reply is *taken in* only together with all others of its tick, so that a tick is either complete
or can be replayed as if nothing had come.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from attention_node.cuda_order import launched_work
from attention_node.exchange import LocalReply
from attention_node.open_tick import TickGivenUp
from attention_node.served_job import JobDescription
from attention_node.tick_server import TickServer
from core_attention.ca_task import Phase
from core_attention.checksum import seal
from core_attention.tick import Tick
from data_plane.buffer_pool import BufferPool, PooledBuffer
from data_plane.liveness import LivenessMonitor
from data_plane.transport import (
    Transfer,
    TransferState,
    TransferTimeout,
    TransportError,
)
from distca.contract.server_loss import LossCause
from trainer_client.step.examiner import Examiner
from trainer_client.step.exchanges import ServerExchange

Tensors = Mapping[str, torch.Tensor]

_LEAST_SECONDS = 1.0
"""Left for a reply whose request took all of the time: a process that was stopped learns of
its end late."""


class ExchangeFailed(Exception):
    """A server cannot give a reply.

    Attributes:
        server_id: which one.
        cause: how it was noticed.
        detail: in words.
    """

    def __init__(self, server_id: str, cause: LossCause, detail: BaseException | str) -> None:
        super().__init__(f"server {server_id}: {detail}")
        self.server_id = server_id
        self.cause = cause
        self.detail = str(detail)


def _transport_failed(server_id: str, error: TransportError | str) -> ExchangeFailed:
    late = isinstance(error, TransferTimeout)
    cause = LossCause.DEADLINE if late else LossCause.TRANSPORT_ERROR
    return ExchangeFailed(server_id, cause, error)


@dataclass(frozen=True, eq=False, kw_only=True)
class Exchanger:
    """The process and the job, as far as sending needs them.

    Attributes:
        job: what the job's members agree on.
        pool: message buffers.
        in_place: this process's own server.
        examiner: looks at other processes' replies.
        liveness: finds servers that are stopped or cut off while they owe something.
        device: of the model's tensors.
        rank_ping_seconds: how long another rank's process may take to give a sign of life.
        deadline_seconds: of every transfer.
    """

    job: JobDescription
    pool: BufferPool
    in_place: TickServer
    examiner: Examiner
    liveness: LivenessMonitor
    device: torch.device
    rank_ping_seconds: float
    deadline_seconds: float

    def send(
        self, exchange: ServerExchange, epoch: int, tick: Tick, inputs: Tensors, outputs: Tensors
    ) -> Awaited:
        """Sends this rank's part of ``tick`` to one server; returns at once.

        Args:
            exchange: with whom, and which rows.
            epoch: of the plan in force.
            tick: which exchange.
            inputs: q, k, v, and for backward also do, lse, delta, by packed row.
            outputs: o and lse, or dq, by packed row: an in-place server writes there.

        Raises:
            ExchangeFailed: the server cannot be sent to.
        """
        connection = exchange.connection
        if connection is None:
            return self._send_local(exchange, epoch, tick, inputs, outputs)
        tag = tick.tag(reply=False)
        request = self.pool.acquire(exchange.request.nbytes)
        packed = None
        try:
            exchange.rows.pack(request.tensor, inputs)
            if self.job.seals(connection):
                seal(request.tensor, tag, connection.sending_key)
            packed = launched_work(self.device)
            sent = connection.put(tag, request, self.deadline_seconds, ready=packed)
        except TransportError as error:
            raise _transport_failed(exchange.server_id, error) from error
        finally:
            # The kernel that packs it has only been launched.
            request.release_when(packed)
        self.await_end(exchange, sent)
        awaited = _RemoteAwaited(self, exchange, tick, inputs, sent)
        sent.add_done_callback(awaited.request_ended)
        return awaited

    def skip(self, exchange: ServerExchange, epoch: int, tick: Tick) -> None:
        """Reports to a server that this rank sends nothing of ``tick``'s lane any more, from
        ``tick`` on. One without a connection learns it from the first step of the next one."""
        if exchange.connection is not None:
            exchange.connection.skip(tick.tag(reply=False))
        elif exchange.server_id == self.in_place.server_id:
            self.in_place.end_local_lane(self.job.job_id, epoch, tick)

    def _send_local(
        self, exchange: ServerExchange, epoch: int, tick: Tick, inputs: Tensors, outputs: Tensors
    ) -> Awaited:
        shape, rows = self.job.shape, exchange.route.n_kv_rows
        partial: dict[str, torch.Tensor] = {}
        if tick.phase is Phase.BACKWARD:
            for name, head_dim in (("dk", shape.head_dim), ("dv", shape.head_dim_v)):
                partial[name] = inputs["k"].new_empty(
                    (rows, shape.num_heads_kv, head_dim), dtype=torch.float32
                )
        try:
            reply = self.in_place.submit_local(
                self.job.job_id, epoch, tick, inputs, {**outputs, **partial}
            )
        except TickGivenUp as error:
            raise ExchangeFailed(exchange.server_id, LossCause.OWN_SERVER, error) from error
        return _LocalAwaited(exchange, reply, partial, self.device)

    def await_end(self, exchange: ServerExchange, transfer: Transfer) -> None:
        """The server owes the end of ``transfer``; its connection fails if it is stopped or cut off
        meanwhile."""
        assert exchange.connection is not None
        server = exchange.plan.servers[exchange.route.server]
        patience = None if server.in_place_rank is None else self.rank_ping_seconds
        self.liveness.watch_until_end(exchange.connection, transfer, patience)


class _RemoteAwaited:
    """A reply of another process.

    Its receive is posted when the request has gone: no server answers before, and the request's
    memory may do for the reply.
    """

    def __init__(
        self,
        exchanger: Exchanger,
        exchange: ServerExchange,
        tick: Tick,
        inputs: Tensors,
        request: Transfer,
    ) -> None:
        self._exchanger = exchanger
        self.exchange = exchange
        self._tick = tick
        self._inputs = inputs
        self._request = request
        self._until = time.monotonic() + exchanger.deadline_seconds
        self._lock = threading.Lock()
        self._is_wanted = True
        self._posted = threading.Event()
        self._buffer: PooledBuffer | None = None
        self._transfer: Transfer | None = None
        self._failure: BaseException | None = None

    @property
    def began_at(self) -> float:
        """``time.monotonic()`` when its request's rows could first move, once it has arrived; 0.0
        if they did not travel."""
        ended_at = self._request.ended_at
        return 0.0 if ended_at is None else ended_at - self._request.moving_seconds

    @property
    def ended_at(self) -> float:
        """``time.monotonic()`` when it arrived; 0.0 if nothing was to come."""
        return (self._transfer.ended_at if self._transfer else None) or 0.0

    def request_ended(self, request: Transfer) -> None:
        """The request has gone, or will not: posts the receive of the reply. On any thread."""
        # Whoever waits for the reply is told why there is none.
        self._failure = request.error
        if self._failure is None:
            try:
                self._post()
            except Exception as error:
                self._failure = error
        self._posted.set()

    def _post(self) -> None:
        connection, nbytes = self.exchange.connection, self.exchange.reply.nbytes
        if not nbytes:
            return
        assert connection is not None
        with self._lock:
            buffer = self._exchanger.pool.acquire(nbytes)
            left_seconds = max(self._until - time.monotonic(), _LEAST_SECONDS)
            try:
                transfer = connection.offer(self._tick.tag(reply=True), buffer, left_seconds)
            except BaseException:
                buffer.release()
                raise
            self._transfer = transfer
            if self._is_wanted:
                self._buffer = buffer
            else:
                # It comes all the same, and its server waits for it to be taken.
                buffer.release()
        self._exchanger.await_end(self.exchange, transfer)

    def arrived(self) -> bool:
        """Return whether it is here.

        Raises:
            ExchangeFailed: it will not come.
        """
        if not self.exchange.reply.nbytes:
            return True
        if not self._posted.is_set():
            return False
        if isinstance(self._failure, TransportError):
            raise _transport_failed(self.exchange.server_id, self._failure) from self._failure
        if self._failure is not None:
            raise self._failure
        transfer = self._transfer
        assert transfer is not None
        # Read once: another thread may end the transfer at any moment.
        state = transfer.state
        if state is TransferState.DONE:
            return True
        if state is TransferState.PENDING:
            return False
        cause = transfer.error or f"the transfer ended as {state}"
        raise _transport_failed(self.exchange.server_id, cause) from transfer.error

    def examine(self) -> None:
        """Looks at what has arrived, before it is taken in.

        Raises:
            ExchangeFailed: it is wrong, by the server's or the network's fault.
        """
        if not self.exchange.reply.nbytes:
            return
        assert self._buffer is not None
        examiner, rule = self._exchanger.examiner, self._exchanger.job.rule(self._tick)
        fault = examiner.fault(self.exchange, self._tick, rule, self._inputs, self._buffer.tensor)
        if fault is not None:
            raise ExchangeFailed(self.exchange.server_id, LossCause.CORRUPT_RESULT, fault)

    def wait(self, timeout_seconds: float) -> None:
        """Returns when it is here, when it will not come, or after ``timeout_seconds``."""
        if not self.exchange.reply.nbytes:
            return
        until = time.monotonic() + timeout_seconds
        if not self._posted.wait(timeout_seconds) or self._transfer is None:
            return
        try:
            self._transfer.wait(max(until - time.monotonic(), 0.0))
        except TransportError:
            return

    def take_in(self, outputs: Tensors, gradients: Tensors) -> None:
        """Puts its rows where they belong: query rows of ``outputs`` are written, rows of the
        float32 ``gradients`` of keys and values are added to. Only once it has arrived."""
        if self.exchange.reply.nbytes:
            buffer, self._buffer = self._buffer, None
            assert buffer is not None
            self.exchange.rows.unpack(buffer.tensor, outputs, gradients)
            # The kernel waits for what the trainer has launched before. Meanwhile the in-place
            # server, which takes from the same pool, must not receive into the memory.
            buffer.release_when(launched_work(buffer.tensor.device))
        self.let_go()

    def let_go(self) -> None:
        """Frees its buffer; it will not be taken in. Idempotent."""
        with self._lock:
            self._is_wanted = False
            buffer, self._buffer = self._buffer, None
            self._inputs = {}
        if buffer is not None:
            buffer.release()


class _LocalAwaited:
    """A reply of this process's own server, which writes the query rows itself."""

    def __init__(
        self, exchange: ServerExchange, reply: LocalReply, partial: Tensors, device: torch.device
    ) -> None:
        self.exchange = exchange
        self._reply = reply
        self._partial = partial
        self._device = device

    @property
    def began_at(self) -> float:
        return 0.0

    @property
    def ended_at(self) -> float:
        return self._reply.ended_at or 0.0

    def arrived(self) -> bool:
        try:
            return self._reply.wait(0.0)
        except TickGivenUp as error:
            raise ExchangeFailed(self.exchange.server_id, LossCause.OWN_SERVER, error) from error

    def examine(self) -> None:
        """This process's own results are not doubted."""

    def wait(self, timeout_seconds: float) -> None:
        try:
            self._reply.wait(timeout_seconds)
        except TickGivenUp:
            return

    def take_in(self, outputs: Tensors, gradients: Tensors) -> None:
        if self._reply.written is not None:
            torch.cuda.current_stream(self._device).wait_event(self._reply.written)
        for name, tensor in self._partial.items():
            gradients[name].index_add_(0, self.exchange.kv_rows, tensor)

    def let_go(self) -> None:
        self._partial = {}


Awaited: TypeAlias = _RemoteAwaited | _LocalAwaited
"""A reply that is to come."""
