"""A step while it runs: its ticks, the plan they run under, what it measured.

Two threads work on it: the training loop's, which sends ticks and waits for them, and the session's
recovery thread, which puts plans in force and replays. One lock guards what they share.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np
import torch

from attention_node.cuda_order import record_event
from core_attention.ca_task import Phase
from core_attention.plan import Plan
from core_attention.tick import Tick
from distca.v1 import jobs_pb2
from trainer_client.errors import CoreAttentionFailed, SessionError
from trainer_client.metrics import OWN_PROCESS, ServedTasks, TrainerMetrics
from trainer_client.step.exchanges import Exchange, PlanInForce
from trainer_client.step.lane_calls import LaneCalls
from trainer_client.step.lane_log import LaneLog, SentTick
from trainer_client.step.replies import Awaited, ExchangeFailed, Exchanger, Tensors
from trainer_client.step.step_report import StepReport, TraceEvent

logger = logging.getLogger(__name__)

CHECK_SECONDS = 0.25
"""How often a wait looks whether something else has ended or begun."""


WAITING_SECONDS = 3.0
"""After so long a wait the control plane is told, which may find that ranks wait for each other."""


class RunningStep:
    """One step of a session; made by ``Session.step``.

    Args:
        plan: this rank's slice of any plan of the step: its documents and where their rows are.
        rank: this rank.
        forward_only: whether there is no backward pass.
        exchanger: sends.
        recovery_timeout_seconds: how long a step may be without a plan in force.
        check: raises what ended the session, if something did.
        connected: whether the control plane can be reached.
        lost: told when a server fails: its id, the epoch of the plan, the cause.
        waiting: told every WAITING_SECONDS of a wait.
        metrics: told of every tick.
        kept_forward_ticks: see :class:`trainer_client.step.lane_log.LaneLog`.

    Attributes:
        complete: every tick that servers expect of this rank is complete.
        closed: the step's block has ended.
        abandoned: it ended before its ticks were complete.
        given_up: why its user gave it up; empty otherwise.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        rank: int,
        forward_only: bool,
        exchanger: Exchanger,
        recovery_timeout_seconds: float,
        check: Callable[[], None],
        connected: Callable[[], bool],
        lost: Callable[[str, int, str], None],
        waiting: Callable[[jobs_pb2.StepWaiting], None],
        metrics: TrainerMetrics,
        kept_forward_ticks: int | None = None,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self.forward_only = forward_only
        self.job = exchanger.job
        self.device = exchanger.device
        self.check = check
        self.trace: list[TraceEvent] = []
        self.report: StepReport | None = None
        self.wait_seconds = self.send_seconds = self.recovery_seconds = 0.0
        self.sent_bytes = self.received_bytes = 0
        self.recoveries = self.replayed_ticks = 0
        self.began_seconds = time.perf_counter()
        self.closed = False
        self.abandoned = False
        self.given_up = ""
        self._exchanger = exchanger
        self._recovery_timeout_seconds = recovery_timeout_seconds
        self._connected = connected
        self._lost = lost
        self._waiting = waiting
        self._metrics = metrics
        self._calls = [
            LaneCalls(
                f"step {plan.step} nano-batch {nano_batch}",
                self.job.n_layers,
                forward_only=forward_only,
            )
            for nano_batch in range(self.job.n_nano_batches)
        ]
        self._changed = threading.Condition(threading.RLock())
        self._in_force: PlanInForce | None = None
        self._epoch = plan.epoch
        self._without_plan_since = time.monotonic()
        self._trouble = "no plan has come"
        self._failure = ""
        self._lanes = [
            LaneLog(shared=self._shares(nano_batch), kept_forward_ticks=kept_forward_ticks)
            for nano_batch in range(self.job.n_nano_batches)
        ]

    @property
    def step(self) -> int:
        return self.plan.step

    @property
    def epoch(self) -> int:
        """Of the plan in force, or of the one that is awaited."""
        return self._epoch

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        """(packed row, offset in its document, length) of this rank's segments, by row."""
        manifest = self.plan.manifest
        nano = manifest.document_nano_batch[manifest.segment_document]
        mine = (manifest.segment_rank == self.rank) & (nano == nano_batch)
        return sorted(
            zip(
                manifest.segment_row[mine].tolist(),
                manifest.segment_offset[mine].tolist(),
                manifest.segment_length[mine].tolist(),
                strict=True,
            )
        )

    def n_rows(self, nano_batch: int) -> int:
        """Packed rows of this rank's nano-batch."""
        return self._n_rows[nano_batch]

    @cached_property
    def _n_rows(self) -> tuple[int, ...]:
        manifest = self.plan.manifest
        return tuple(
            int(manifest.tokens_per_rank(nano_batch)[self.rank])
            for nano_batch in range(self.job.n_nano_batches)
        )

    def forward_call(self, nano_batch: int, *, needs_backward: bool) -> int:
        """Counts a nano-batch's attention calls; returns the call's layer.

        Raises:
            SessionError: see :meth:`trainer_client.step.lane_calls.LaneCalls.forward`.
        """
        with self._changed:
            return self._calls[nano_batch].forward(needs_backward)

    def backward_call(self, nano_batch: int, layer: int) -> None:
        """The backward pass of a call begins.

        Raises:
            SessionError: see :meth:`trainer_client.step.lane_calls.LaneCalls.backward`.
        """
        if self._n_rows[nano_batch]:
            with self._changed:
                self._calls[nano_batch].backward(layer)

    def lane_returned(self, nano_batch: int) -> None:
        """The forward pass of a nano-batch is over.

        Raises:
            SessionError: it has rows, and called core attention less often than the job said.
        """
        if self._n_rows[nano_batch]:
            self._calls[nano_batch].returned()

    def give_up(self, reason: str) -> None:
        """Allows the step's block to end before its backward passes are complete, as when the loss
        is not finite. Ranks that still need this one's rows for it get an error with ``reason``."""
        self.given_up = reason

    def check_ended(self) -> None:
        """The step's block has ended without an error.

        Raises:
            SessionError: ticks that servers expect of this rank are missing, and nobody gave the
                step up; names how many calls were made.
        """
        if self.complete or self.given_up:
            return
        if not self.called:
            # A model that silently runs another implementation would train without being served.
            raise SessionError(
                f"step {self.step} ended without a call of core attention; load the model with "
                "attn_implementation='distca' after "
                "'import trainer_client.integrations.transformers' (building another model from "
                "the same config object changes it), or call trainer_client.core_attention. If it "
                "was loaded so, its model type computes attention without transformers' attention "
                "interface: trainer_client.integrations.transformers.check_documents(model) says "
                "why"
            )
        raise SessionError(
            f"step {self.step} was not run to its end: {self.unfinished}; run backward inside the "
            "step's block, from a loss that depends on every layer of every nano-batch. For "
            "evaluation use torch.no_grad or submit(..., forward_only=True); to leave a step out "
            "on purpose, as when the loss is not finite, call give_up(reason) of the step"
        )

    @property
    def unfinished(self) -> str:
        """Which lanes lack ticks, in words."""
        return ", ".join(
            f"nano-batch {nano_batch} made {calls.forward_calls} of {self.job.n_layers} forward "
            f"and {calls.backward_calls} of {calls.expected_backward_calls} backward calls of core "
            "attention"
            for nano_batch, calls in enumerate(self._calls)
            if not self._is_over(nano_batch)
        )

    @property
    def called(self) -> bool:
        """Whether core attention was called at all; True for a step without rows."""
        return any(calls.forward_calls for calls in self._calls) or not any(self._n_rows)

    @property
    def complete(self) -> bool:
        """Whether every tick that servers expect of this rank is complete."""
        return all(map(self._is_over, range(self.job.n_nano_batches)))

    @property
    def may_be_asked(self) -> bool:
        """Whether another rank may still need rows of this one, or this one has not finished."""
        return not self.abandoned and (not self.closed or any(lane.shared for lane in self._lanes))

    def served_tasks(self) -> Iterator[ServedTasks]:
        """What every server of the plan in force runs for this rank in the step."""
        plan, n_layers = self._in_force, self.job.n_layers
        for nano_batch in range(self.job.n_nano_batches if plan else 0):
            backward = self._calls[nano_batch].expected_backward_calls
            for phase, layers in ((Phase.FORWARD, n_layers), (Phase.BACKWARD, backward)):
                if not layers:
                    continue
                assert plan is not None
                last = Tick(
                    self.step, 0 if phase is Phase.BACKWARD else n_layers - 1, nano_batch, phase
                )
                for exchange in plan.exchanges(last):
                    route, connection = exchange.route, exchange.connection
                    yield ServedTasks(
                        server_id=exchange.server_id,
                        transport=OWN_PROCESS if connection is None else connection.transport,
                        phase=phase,
                        tasks=len(route.task) * layers,
                        q_rows=route.n_q_rows * layers,
                        kv_rows=route.n_kv_rows * layers,
                    )

    def send(self, tick: Tick, inputs: Tensors, outputs: Tensors) -> SentTick:
        """Sends this rank's part of ``tick`` to every server, or keeps it until a plan is in force;
        returns at once.

        Args:
            tick: which exchange.
            inputs: q, k, v, and for backward also do, lse, delta, by packed row.
            outputs: o and lse, or dq, by packed row, to be written.

        Raises:
            CoreAttentionFailed: the step is over, or this process's own server has failed.
        """
        if self.closed:
            raise CoreAttentionFailed(
                f"step {self.step} is over; run backward inside the step's block"
            )
        # Another thread may send them again, outside autograd.
        inputs = {name: tensor.detach() for name, tensor in inputs.items()}
        sent = SentTick(
            tick, tick.lane_index(self.job.n_layers), inputs, outputs, record_event(self.device)
        )
        with self._changed:
            self._lanes[tick.nano_batch].add(sent)
            if self._in_force is not None:
                self._send(sent, self._in_force)
        return sent

    def wait(self, sent: SentTick) -> None:
        """Waits until ``sent`` is complete, through recoveries.

        Raises:
            CoreAttentionFailed: this process's own server failed, the step cannot be replayed, or
                no plan came into force in ``recovery_timeout_seconds``.
            SessionClosed: the job ended.
        """
        began_at = time.monotonic()
        say_at = began_at + WAITING_SECONDS
        while True:
            with self._changed:
                if self._take_in(sent, began_at):
                    return
                if time.monotonic() > say_at:
                    say_at += WAITING_SECONDS
                    self._say_waiting(sent)
                pending = self._pending(sent)
                if pending is None:
                    self._wait_for_plan()
            if pending is not None:
                pending.wait(CHECK_SECONDS)
            self.check()

    def suspend(self, epoch: int, reason: str) -> jobs_pb2.StepProgress:
        """The plan in force is void, and so is whatever has not been taken in; returns how far
        this rank is. Inputs are kept until a plan of ``epoch`` or later is in force."""
        with self._changed:
            if epoch > self._epoch:
                self._epoch = epoch
                self._leave_plan(reason)
            return jobs_pb2.StepProgress(
                step=self.step,
                complete_ticks=list(map(self._progress, range(self.job.n_nano_batches))),
                done=self.closed,
            )

    def resume(self, plan: PlanInForce) -> None:
        """Puts ``plan`` in force and replays what was sent of its ticks; does nothing if a later
        recovery has begun."""
        with self._changed:
            if self.abandoned or plan.epoch < self._epoch:
                return
            if self._in_force is not None and self._in_force.epoch == plan.epoch:
                return
            self._leave_plan("another plan has come")
            self._epoch = plan.epoch
            self._in_force = plan
            replayed = [sent for lane in self._lanes for sent in self._replayed(lane, plan)]
            for sent in replayed:
                if self._in_force is plan:
                    self._send(sent, plan)
            for nano_batch in range(self.job.n_nano_batches):
                self._end_lane(nano_batch)
            if replayed:
                self._count_recovery(replayed, plan)
            self._changed.notify_all()

    def trouble(self, reason: str) -> None:
        """Why the plan is not in force yet, for the error if none ever is."""
        with self._changed:
            self._trouble = reason

    def fail(self, reason: str) -> None:
        """No plan will come any more: whoever waits is told ``reason``."""
        with self._changed:
            self._failure = reason
            self._changed.notify_all()

    def abandon(self) -> None:
        """The step was given up: its ticks will neither be completed nor replayed."""
        with self._changed:
            self.abandoned = True
            self._in_force = None
            self.release()

    def release(self) -> None:
        """Every rank has finished the step, or this one gave it up: keeps no inputs."""
        with self._changed:
            for lane in self._lanes:
                lane.release()

    def _send(self, sent: SentTick, plan: PlanInForce) -> None:
        """Needs the lock. A server that cannot be sent to is reported; the tick then waits for
        another plan."""
        if sent.inputs is None:
            self.fail(f"{sent.tick} is to be replayed, and its rows are kept no longer")
            return
        if sent.written is not None:
            torch.cuda.current_stream(self.device).wait_event(sent.written)
        inputs, outputs = sent.inputs, sent.outputs
        if sent.complete:
            outputs = {
                name: torch.empty_like(tensor, device=self.device)
                for name, tensor in outputs.items()
            }
        if "q" not in inputs:
            # Whatever comes back for these queries is let go; they must only be finite.
            rows, shape = len(inputs["k"]), self.job.shape
            inputs = {"q": inputs["k"].new_zeros(rows, shape.num_heads, shape.head_dim), **inputs}
        sent.awaited = []
        for exchange in self._sending_order(plan, sent.tick):
            try:
                awaited = self._exchanger.send(exchange, plan.epoch, sent.tick, inputs, outputs)
            except ExchangeFailed as error:
                self._server_failed(sent, error)
                return
            sent.awaited.append(awaited)
            if exchange.connection is not None:
                self.sent_bytes += exchange.request.nbytes
                self.received_bytes += exchange.reply.nbytes
        # Taken in in the plan's order, whatever the order of sending.
        sent.awaited.sort(key=lambda each: each.exchange.route.server)
        sent.sent_at = time.monotonic()
        if sent.complete:
            # Only this rank's rows were needed. What comes back is received and let go.
            sent.stop_awaiting()

    def _sending_order(self, plan: PlanInForce, tick: Tick) -> list[Exchange]:
        """Every rank begins with another server, and its own one comes last: if all began with the
        first, its network would be crowded while the others' lie idle."""
        n_servers = len(plan.plan.servers)
        return sorted(
            plan.exchanges(tick),
            key=lambda exchange: (exchange.route.server - self.rank - 1) % n_servers,
        )

    def _take_in(self, sent: SentTick, began_at: float) -> bool:
        """Completes ``sent`` if all its replies are here. Needs the lock."""
        if self._failure:
            raise CoreAttentionFailed(f"{sent.tick}: {self._failure}")
        if sent.awaited is None:
            return False
        try:
            if not all(reply.arrived() for reply in sent.awaited):
                return False
            for reply in sent.awaited:
                reply.examine()
        except ExchangeFailed as error:
            self._server_failed(sent, error)
            return False
        if sent.tick.phase is Phase.BACKWARD:
            sent.gradients = self._zero_gradients(sent)
        answered_at = max([sent.sent_at, *(reply.ended_at for reply in sent.awaited)])
        for reply in sent.awaited:
            reply.take_in(sent.outputs, sent.gradients)
        self._lanes[sent.tick.nano_batch].completed(sent)
        self._end_lane(sent.tick.nano_batch)
        self._metrics.tick_collected(
            sent.tick.phase,
            flight_seconds=answered_at - sent.sent_at,
            exposed_seconds=max(answered_at - max(began_at, sent.sent_at), 0.0),
        )
        return True

    def _say_waiting(self, sent: SentTick) -> None:
        """Other ranks may be waiting for this one in the same way. Needs the lock."""
        needed = self._needed_ranks(sent.tick)
        if needed and sent.awaited is not None:
            self._waiting(
                jobs_pb2.StepWaiting(
                    nano_batch=sent.tick.nano_batch,
                    tick=sent.index,
                    sent_ticks=[lane.sent_ticks for lane in self._lanes],
                    needed_ranks=needed,
                )
            )

    def _needed_ranks(self, tick: Tick) -> list[int]:
        """The ranks whose rows this rank's reply of ``tick`` needs: forward, those with earlier
        rows of its documents; backward, with any."""
        manifest = self.plan.manifest
        in_lane = manifest.document_nano_batch[manifest.segment_document] == tick.nano_batch
        mine = in_lane & (manifest.segment_rank == self.rank)
        last = np.full(manifest.n_documents, -1, dtype=np.int64)
        np.maximum.at(last, manifest.segment_document[mine], manifest.segment_offset[mine])
        needed = in_lane & ~mine & (last[manifest.segment_document] >= 0)
        if tick.phase is Phase.FORWARD:
            needed &= manifest.segment_offset < last[manifest.segment_document]
        return [int(rank) for rank in np.unique(manifest.segment_rank[needed])]

    def _is_over(self, nano_batch: int) -> bool:
        """Whether every tick of the lane that will come is complete."""
        ticks = self._lanes[nano_batch].complete_ticks
        return not self._n_rows[nano_batch] or ticks == self._calls[nano_batch].n_ticks

    def _progress(self, nano_batch: int) -> int:
        """How many of the ticks that servers count are complete. A lane that is over has none to
        come, although it may be shorter. Needs the lock."""
        if self._is_over(nano_batch):
            return self._ticks_per_lane
        return self._lanes[nano_batch].complete_ticks

    def _end_lane(self, nano_batch: int) -> None:
        """Where the lane is over before its last tick, because no gradients are needed from some
        layer down, tells the servers that expect another one. Needs the lock."""
        n_ticks = self._calls[nano_batch].n_ticks
        plan = self._in_force
        if plan is None or n_ticks is None or n_ticks >= self._ticks_per_lane:
            return
        if not self._is_over(nano_batch):
            return
        layer = 2 * self.job.n_layers - 1 - n_ticks
        tick = Tick(self.step, layer, nano_batch, Phase.BACKWARD)
        for exchange in plan.exchanges(tick):
            self._exchanger.skip(exchange, plan.epoch, tick)

    def _pending(self, sent: SentTick) -> Awaited | None:
        """A reply that ``sent`` still waits for; None if it waits for a plan. Needs the lock."""
        try:
            return next((r for r in sent.awaited or () if not r.arrived()), None)
        except ExchangeFailed as error:
            # It was under way a moment ago.
            self._server_failed(sent, error)
            return None

    def _zero_gradients(self, sent: SentTick) -> dict[str, torch.Tensor]:
        dq, shape = sent.outputs["dq"], self.job.shape
        return {
            name: dq.new_zeros((dq.shape[0], shape.num_heads_kv, head_dim), dtype=torch.float32)
            for name, head_dim in (("dk", shape.head_dim), ("dv", shape.head_dim_v))
        }

    def _server_failed(self, sent: SentTick, error: ExchangeFailed) -> None:
        """Reports a server; the step is without a plan until a recovery brings one. (This
        process's own server may only have heard of a recovery before this rank: then the report is
        of an epoch that is over.) Needs the lock."""
        if self._in_force is not None:
            self._leave_plan(f"{sent.tick}: {error}")
            self._lost(error.server_id, self._epoch, f"{sent.tick}: {error.cause}")

    def _count_recovery(self, replayed: list[SentTick], plan: PlanInForce) -> None:
        seconds = time.monotonic() - self._without_plan_since
        self.recoveries += 1
        self.replayed_ticks += len(replayed)
        self.recovery_seconds += seconds
        self._metrics.recovered(seconds)
        for sent in replayed:
            at_home = all(e.connection is None for e in plan.exchanges(sent.tick))
            self._metrics.tick_replayed(sent.tick.phase, "home" if at_home else "server")
        logger.info(
            "step %d goes on with epoch %d: %d ticks replayed after %.3f s",
            self.step,
            plan.epoch,
            len(replayed),
            seconds,
        )

    def _leave_plan(self, trouble: str) -> None:
        """No tick is under way any more. Needs the lock."""
        if self._in_force is not None:
            self._in_force = None
            self._without_plan_since = time.monotonic()
        self._trouble = trouble
        for lane in self._lanes:
            for sent in lane:
                for _ in range(sent.stop_awaiting()):
                    self._metrics.stale_result()

    def _wait_for_plan(self) -> None:
        """Waits a little for a plan. Needs the lock."""
        if not self._connected():
            # Nobody can make a plan now; the link has a deadline of its own.
            self._without_plan_since = time.monotonic()
        elif time.monotonic() - self._without_plan_since > self._recovery_timeout_seconds:
            raise CoreAttentionFailed(
                f"step {self.step} is without a plan for {self._recovery_timeout_seconds:g} s "
                f"after: {self._trouble}; see the control plane's log"
            )
        self._changed.wait(CHECK_SECONDS)

    def _replayed(self, lane: LaneLog, plan: PlanInForce) -> Iterator[SentTick]:
        """What is not complete, and complete ticks that rows of this rank still go into. The plan
        may begin earlier: with documents of other ranks that this one's own server runs."""
        return (sent for sent in lane if not sent.complete or plan.exchanges(sent.tick))

    def _shares(self, nano_batch: int) -> bool:
        """Whether a document of the nano-batch has rows here and on another rank."""
        manifest = self.plan.manifest
        here = np.unique(manifest.segment_document[manifest.segment_rank == self.rank])
        here = here[manifest.document_nano_batch[here] == nano_batch]
        away = manifest.segment_document[manifest.segment_rank != self.rank]
        return bool(np.isin(here, away).any())

    @property
    def _ticks_per_lane(self) -> int:
        return self.job.n_layers * (1 if self.forward_only else 2)

    @contextmanager
    def timed(self, lane: str, name: str, detail: str = "") -> Iterator[None]:
        """Records a :class:`TraceEvent` around a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.record(lane, name, begin, end, detail)
            if name == "wait":
                self.wait_seconds += end - begin
            elif name == "send":
                self.send_seconds += end - begin

    def record(self, lane: str, name: str, begin: float, end: float, detail: str = "") -> None:
        """Adds an event with times on ``time.perf_counter``'s clock."""
        with self._changed:
            self.trace.append(
                TraceEvent(lane, name, begin - self.began_seconds, end - self.began_seconds, detail)
            )
