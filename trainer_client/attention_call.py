"""One core-attention call of one nano-batch: send and collect, forward and backward.

Each phase has two halves. ``send_*`` packs one request per server and returns at once;
``collect_*`` waits for the replies and puts the rows back in their places. Between them the trainer
computes something else: with ping-pong, the other nano-batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from attention_node.cuda_order import record_event
from attention_node.open_tick import TickGivenUp
from attention_node.tick_server import LocalReply
from core_attention.ca_task import Phase
from core_attention.message_views import message_views
from core_attention.tick import Tick
from data_plane.buffer_pool import PooledBuffer
from data_plane.transport import Transfer, TransferState, TransferTimeout, TransportError
from trainer_client.errors import CoreAttentionFailed
from trainer_client.running_step import Exchange, RunningStep

CHECK_SECONDS = 0.25
"""How often a wait looks whether the session has ended for another reason."""

Tensors = Mapping[str, torch.Tensor]


@dataclass(eq=False)
class _RemoteReply:
    exchange: Exchange
    buffer: PooledBuffer
    transfer: Transfer | None


@dataclass(eq=False)
class _LocalReply:
    exchange: Exchange
    outputs: Tensors
    reply: LocalReply


@dataclass(eq=False)
class _SentTick:
    """A tick between its two halves.

    Attributes:
        tick: which exchange.
        outputs: o and lse, or dq: by packed row, written in place.
        replies: what is still to come, in the plan's order of servers.
        sent_at: ``time.monotonic()`` when all requests were handed over.
        answered_at: the same when the last reply so far arrived.
    """

    tick: Tick
    outputs: Tensors
    replies: list[_RemoteReply | _LocalReply] = field(default_factory=list)
    sent_at: float = 0.0
    answered_at: float = 0.0


class AttentionCall:
    """The exchanges of one (step, layer, nano-batch).

    Args:
        running: the step.
        layer: index of the call in the nano-batch's forward.
        nano_batch: which nano-batch.
    """

    def __init__(self, running: RunningStep, layer: int, nano_batch: int) -> None:
        self._running = running
        self._layer = layer
        self._nano_batch = nano_batch
        self._sent: _SentTick | None = None
        self._phases_sent: set[Phase] = set()
        self.lane = f"nano-batch {nano_batch}"

    def send_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends q ``[rows, heads, head_dim]``, k and v ``[rows, heads_kv, head_dim]``, packed
        rows of this rank's nano-batch."""
        shape, n_rows = self._running.job.shape, q.shape[0]
        outputs = {
            "o": q.new_empty((n_rows, shape.num_heads, shape.head_dim_v)),
            "lse": q.new_empty((n_rows, shape.num_heads), dtype=torch.float32),
        }
        self._send(Phase.FORWARD, {"q": q, "k": k, "v": v}, outputs)

    def collect_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for o ``[rows, heads, head_dim_v]`` and lse ``[rows, heads]`` float32.

        Raises:
            CoreAttentionFailed: a server failed or the tick's deadline passed.
            SessionClosed: the job ended.
        """
        outputs, _ = self._collect(Phase.FORWARD)
        return outputs["o"], outputs["lse"]

    def send_backward(self, inputs: Tensors) -> None:
        """Sends q, k, v, do, lse and delta, by packed row."""
        self._send(Phase.BACKWARD, inputs, {"dq": torch.empty_like(inputs["q"])})

    def collect_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Waits for dq, dk and dv, in the dtype of q.

        dk and dv come from several servers: they are summed in float32, in the plan's order of
        servers, and rounded once.

        Raises:
            CoreAttentionFailed, SessionClosed: as :meth:`collect_forward`.
        """
        outputs, gradients = self._collect(Phase.BACKWARD)
        self._running.backward_tick_done()
        dq = outputs["dq"]
        return dq, gradients["dk"].to(dq.dtype), gradients["dv"].to(dq.dtype)

    def _send(self, phase: Phase, inputs: Tensors, outputs: Tensors) -> None:
        running = self._running
        if running.closed:
            raise CoreAttentionFailed(
                f"step {running.step} is over; run backward inside the step's block"
            )
        tick = Tick(running.step, self._layer, self._nano_batch, phase)
        if phase is Phase.BACKWARD and running.forward_only:
            raise CoreAttentionFailed(
                f"{tick}: the step was submitted as forward-only; submit it with "
                "forward_only=False to run backward"
            )
        if phase in self._phases_sent:
            raise CoreAttentionFailed(
                f"{tick} was run before; core attention is differentiable once: run backward once, "
                "without retain_graph"
            )
        self._phases_sent.add(phase)
        self._sent = sent = _SentTick(tick, outputs)
        running.outstanding.add(self)
        with running.timed(self.lane, "send", _describe(tick)):
            for exchange in running.exchanges[self._nano_batch, phase]:
                if exchange.connection is None:
                    sent.replies.append(self._send_local(tick, exchange, inputs, outputs))
                else:
                    sent.replies.append(self._send_remote(tick, exchange, inputs))
        sent.sent_at = sent.answered_at = time.monotonic()

    def give_up(self) -> None:
        """Lets go of the replies that will not be collected."""
        sent, self._sent = self._sent, None
        for reply in sent.replies if sent else ():
            if isinstance(reply, _RemoteReply):
                reply.buffer.release()

    def _send_local(
        self, tick: Tick, exchange: Exchange, inputs: Tensors, outputs: Tensors
    ) -> _LocalReply:
        running = self._running
        assert running.in_place is not None
        if tick.phase is Phase.BACKWARD:
            shape, rows = running.job.shape, exchange.route.n_kv_rows
            outputs = {
                **outputs,
                "dk": _gradient(inputs["k"], rows, shape.head_dim),
                "dv": _gradient(inputs["v"], rows, shape.head_dim_v),
            }
        try:
            reply = running.in_place.submit_local(running.job.job_id, tick, inputs, outputs)
        except TickGivenUp as error:
            running.check()
            raise CoreAttentionFailed(str(error)) from error
        return _LocalReply(exchange, outputs, reply)

    def _send_remote(self, tick: Tick, exchange: Exchange, inputs: Tensors) -> _RemoteReply:
        running, connection = self._running, exchange.connection
        assert connection is not None
        request = running.pool.acquire(exchange.request.nbytes)
        for name, view in message_views(request.tensor, exchange.request).items():
            rows = exchange.kv_rows if name in ("k", "v") else exchange.q_rows
            torch.index_select(inputs[name], 0, rows, out=view)
        reply = running.pool.acquire(exchange.reply.nbytes)
        deadline = running.tick_timeout_seconds
        try:
            transfer = None
            if exchange.reply.nbytes:
                transfer = connection.offer(tick.tag(reply=True), reply, deadline)
            packed = record_event(running.device)
            connection.put(
                tick.tag(reply=False), request, deadline, ready=packed.query if packed else None
            )
        except TransportError as error:
            reply.release()
            raise self._failed(tick, exchange, error) from error
        finally:
            request.release()
        running.sent_bytes += exchange.request.nbytes
        running.received_bytes += exchange.reply.nbytes
        return _RemoteReply(exchange, reply, transfer)

    def _collect(self, phase: Phase) -> tuple[Tensors, Tensors]:
        sent = self._sent
        if sent is None or sent.tick.phase is not phase:
            raise CoreAttentionFailed(
                f"nano-batch {self._nano_batch} layer {self._layer}: {phase} collected before it "
                "was sent; run backward once, in the step's own block"
            )
        gradients: dict[str, torch.Tensor] = {}
        if phase is Phase.BACKWARD:
            shape, n_rows = self._running.job.shape, sent.outputs["dq"].shape[0]
            gradients = {
                "dk": _gradient(sent.outputs["dq"], n_rows, shape.head_dim, shape.num_heads_kv),
                "dv": _gradient(sent.outputs["dq"], n_rows, shape.head_dim_v, shape.num_heads_kv),
            }
            for gradient in gradients.values():
                gradient.zero_()
        with self._running.timed(self.lane, "wait", _describe(sent.tick)):
            began_at = time.monotonic()
            deadline = began_at + self._running.tick_timeout_seconds
            while sent.replies:
                reply = sent.replies[0]
                if isinstance(reply, _LocalReply):
                    self._wait_local(sent.tick, reply, deadline)
                    tensors = reply.outputs
                else:
                    self._wait_remote(sent.tick, reply, deadline)
                    tensors = message_views(reply.buffer.tensor, reply.exchange.reply)
                sent.answered_at = max(sent.answered_at, _ended_at(reply))
                _put_rows(tensors, sent.outputs, gradients, reply.exchange)
                del sent.replies[0]
                if isinstance(reply, _RemoteReply):
                    reply.buffer.release()
        self._sent = None
        self._running.outstanding.discard(self)
        self._running.metrics.tick_collected(
            phase,
            flight_seconds=sent.answered_at - sent.sent_at,
            exposed_seconds=max(sent.answered_at - began_at, 0.0),
        )
        return sent.outputs, gradients

    def _wait_local(self, tick: Tick, reply: _LocalReply, deadline: float) -> None:
        try:
            while not reply.reply.wait(CHECK_SECONDS):
                self._running.check()
                if time.monotonic() > deadline:
                    raise CoreAttentionFailed(
                        f"{tick}: no result from this process's own server "
                        f"{reply.exchange.server_id} in {self._running.tick_timeout_seconds:g} s; "
                        "a rank whose K/V it needs is late, or the device hangs"
                    )
        except TickGivenUp as error:
            self._running.check()
            raise CoreAttentionFailed(str(error)) from error
        if reply.reply.written is not None:
            torch.cuda.current_stream(self._running.device).wait_event(reply.reply.written)

    def _wait_remote(self, tick: Tick, reply: _RemoteReply, deadline: float) -> None:
        transfer = reply.transfer
        while transfer is not None:
            try:
                transfer.wait(CHECK_SECONDS)
                return
            except TransportError as error:
                self._running.check()
                # The wait may time out in the very moment in which the transfer ends.
                if not isinstance(error, TransferTimeout) or transfer.error is not None:
                    raise self._failed(tick, reply.exchange, transfer.error or error) from error
                if transfer.state is TransferState.PENDING and time.monotonic() > deadline:
                    raise self._failed(
                        tick,
                        reply.exchange,
                        f"no result in {self._running.tick_timeout_seconds:g} s; the server, or a "
                        "rank whose rows it needs, is stopped, cut off or too slow",
                    ) from error

    def _failed(
        self, tick: Tick, exchange: Exchange, cause: TransportError | str
    ) -> CoreAttentionFailed:
        return CoreAttentionFailed(f"{tick}: server {exchange.server_id}: {cause}")


def _gradient(
    like: torch.Tensor, n_rows: int, head_dim: int, num_heads: int | None = None
) -> torch.Tensor:
    heads = like.shape[1] if num_heads is None else num_heads
    return like.new_empty((n_rows, heads, head_dim), dtype=torch.float32)


def _put_rows(tensors: Tensors, outputs: Tensors, gradients: Tensors, exchange: Exchange) -> None:
    """Puts a reply's rows where they belong; the in-place server wrote its query rows itself."""
    for name, tensor in tensors.items():
        if name in gradients:
            gradients[name].index_add_(0, exchange.kv_rows, tensor.to(torch.float32))
        elif exchange.connection is not None:
            outputs[name].index_copy_(0, exchange.q_rows, tensor)


def _ended_at(reply: _RemoteReply | _LocalReply) -> float:
    """When a reply that is here arrived; long ago if none was to come."""
    end = reply.reply if isinstance(reply, _LocalReply) else reply.transfer
    return (end.ended_at if end is not None else None) or 0.0


def _describe(tick: Tick) -> str:
    return f"layer {tick.layer} {tick.phase}"
