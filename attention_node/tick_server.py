"""Serves ticks: posts receives ahead of the data, hands messages to the executor, sends replies.

The same class serves a pool node and a trainer's in-place server. It is driven by three kinds of
threads, none of which it blocks: the transport's (accept, message done), the executor's (reply,
release), and those that bring plans. What to do is decided by a ``ServerMachine``; its lock is held
for the decision alone, never while an instruction is carried out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ParamSpec

import torch
from prometheus_client import CollectorRegistry

from attention_node.cuda_order import launched_work, record_event
from attention_node.exchange import ExchangeTimer, LocalReply
from attention_node.executor import Executor
from attention_node.hello import (
    HelloRefusal,
    HelloRefused,
    check_hello,
    check_proof,
    parse_hello,
)
from attention_node.machine import instructions
from attention_node.machine.server import Answer, Instructions, RankRefusal, ServerMachine
from attention_node.message_memory import MessageMemory
from attention_node.metrics import NodeMetrics
from attention_node.open_tick import OpenTick, Source, TickGivenUp
from attention_node.served_job import ExchangeTimes, JobDescription, ServedStep, StepBusy
from core_attention.arrays import Int64Array
from core_attention.checksum import ChecksumMismatch, seal, verify
from core_attention.message_views import message_views
from core_attention.plan import Plan
from core_attention.tick import Tick
from data_plane.buffer_pool import BufferPool, BufferPoolExhausted, PooledBuffer
from data_plane.device_memory import DriverError
from data_plane.transport import (
    Claim,
    Connection,
    MessageSizeMismatch,
    PeerClosed,
    PeerReset,
    Transfer,
    TransferState,
    TransportError,
)
from distca.contract.timeouts import default_seconds
from distca.process import tracing
from distca.v1 import data_plane_pb2

logger = logging.getLogger(__name__)

NO_MEMORY = (BufferPoolExhausted, DriverError, MemoryError, torch.OutOfMemoryError)
"""The exceptions of a buffer pool when it has no room, or the device gives it none."""

LANE_DEADLINE_SECONDS = default_seconds("lane_deadline_seconds")
"""A posted receive waits for as long as its trainer computes, evaluates or saves. When the trainer
dies, its connection ends it; when it hangs, its lease: the control plane closes the job."""


@dataclass(frozen=True, eq=False)
class _Peer:
    """A trainer rank that is connected."""

    job: JobDescription
    rank: int
    connection: Connection

    def fail(self, tick: Tick, server_id: str, error: BaseException) -> None:
        """Ends the rank's connection, with the reason why it gets no result of ``tick``."""
        logger.warning("%s of rank %d: %s", tick, self.rank, error)
        self.connection.close(f"{tick} failed on server {server_id}: {error}")


_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True, eq=False)
class _Posting:
    """A receive to post, or posted: whose, of which tick, and its buffers.

    Attributes:
        reply: None if it is taken when the request is here.
    """

    peer: _Peer
    step: ServedStep
    tick: Tick
    request: PooledBuffer
    reply: PooledBuffer | None

    def release(self) -> None:
        """Gives the buffers back."""
        self.request.release()
        if self.reply is not None:
            self.reply.release()


class Host:
    """The process that a tick server is part of, as the tick server calls it, on any thread."""

    def step_finished(self, busy: StepBusy) -> None:
        """Takes the busy seconds of a finished step."""

    def rank_lost(self, job_id: str, rank: int) -> None:
        """Takes job and rank of a connection that was reset."""


class TickServer:
    """Receives requests, runs them on the executor, sends replies.

    Args:
        server_id: the server's name in plans.
        executor: runs the tasks.
        pool: buffers for messages.
        host: the process around it.
        metrics: of the server; None counts for nobody.
        local_rank: the rank whose process this is, or None.
        reply_deadline_seconds: a reply that a trainer does not take for so long fails its
            connection.
    """

    def __init__(
        self,
        server_id: str,
        executor: Executor,
        pool: BufferPool,
        host: Host,
        metrics: NodeMetrics | None = None,
        *,
        local_rank: int | None = None,
        reply_deadline_seconds: float = default_seconds("reply_timeout_seconds"),
    ) -> None:
        self.server_id = server_id
        self._executor = executor
        self._pool = pool
        self._local_rank = local_rank
        self._reply_deadline_seconds = reply_deadline_seconds
        self._host = host
        self._metrics = metrics or NodeMetrics(CollectorRegistry(), server_id)
        self._lock = threading.Lock()
        self._machine: ServerMachine[_Peer, ServedStep] = ServerMachine(server_id, pool.limit_bytes)
        self._jobs: dict[str, JobDescription] = {}
        self._memory = MessageMemory(pool, lambda: self._decide(self._machine.memory_freed))
        self._metrics.watch(executor, lambda: self.open_ticks)

    @property
    def open_ticks(self) -> int:
        """Ticks of which some messages have arrived."""
        with self._lock:
            return self._machine.n_open_ticks

    @property
    def job_ids(self) -> list[str]:
        """The open jobs."""
        with self._lock:
            return self._machine.job_ids

    @property
    def lost_ranks(self) -> list[tuple[str, int]]:
        """Jobs and ranks whose connection was reset of late, and that have made no other."""
        with self._lock:
            self._machine.now = time.monotonic()
            return self._machine.lost_ranks

    @property
    def has_ranks(self) -> bool:
        """Returns whether a rank is connected."""
        with self._lock:
            return self._machine.has_ranks

    @property
    def idle(self) -> bool:
        """Returns whether no planned step is unfinished and every reply has left."""
        with self._lock:
            return self._machine.idle

    def is_serving(self, last_step: int, first_step: int = 0) -> bool:
        """Returns whether a step from ``first_step`` to ``last_step`` is unfinished, or a reply has
        not left yet."""
        with self._lock:
            return self._machine.is_serving(last_step, first_step)

    def open_job(self, description: JobDescription) -> None:
        """Admits a job; its trainers may connect from now on."""
        job_id = description.job_id
        with self._lock:
            self._jobs.setdefault(job_id, description)
            self._machine.open_job(
                job_id,
                description.n_nano_batches,
                description.order,
                description.head_groups,
            )
        logger.info("job %s opened", job_id)

    def add_plan(
        self,
        job_id: str,
        plan: Plan,
        *,
        forward_only: bool,
        first_tick: Int64Array | None = None,
    ) -> None:
        """Takes in the plan of a step, and posts receives for it where nothing comes before. A
        plan that came already (by step and epoch), that a recovery has made void, or of a job that
        is closed, is ignored.
        One of a higher epoch than the step's plan so far is a sign of a recovery.

        Args:
            job_id: the job.
            plan: this server's slice.
            forward_only: the step has no backward pass.
            first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.
        """
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or not self._machine.wants_plan(job_id, plan.step, plan.epoch):
                return
        step = ServedStep(
            job,
            plan,
            first_tick=first_tick,
            server_id=self.server_id,
            local_rank=self._local_rank,
            forward_only=forward_only,
            device=self._executor.device,
            on_tick_over=self._tick_over,
        )
        step.prepare(self._executor.kernel)
        self._decide(self._machine.step_planned, job_id, step, step.outline)

    def recover(self, job_id: str, epoch: int) -> None:
        """Drops the steps and connections of a job whose epoch is below ``epoch``, and takes in no
        more of them. Does nothing if the job is unknown or has recovered so far already."""
        self._decide(self._machine.recover, job_id, epoch)

    def close_job(self, job_id: str, reason: str) -> None:
        """Forgets a job: its connections are closed and its open ticks given up."""
        with self._lock:
            self._jobs.pop(job_id, None)
            due = self._machine.close_job(job_id, reason)
        self._carry_out(due)
        self._pool.forget((self.server_id, job_id))

    def accept(self, claim: Claim, connection: Connection) -> bytes:
        """The transport's accept callback: admits a rank of an open job.

        Raises:
            HelloRefused: the rank is not welcome.
        """
        try:
            return self._admit(claim, connection)
        except HelloRefused as refused:
            self._metrics.series.at(reason=refused.reason).sessions_refused_total.inc()
            raise

    def _admit(self, claim: Claim, connection: Connection) -> bytes:
        message = parse_hello(claim.hello)
        job_id, rank = message.job_id, message.rank
        with self._lock:
            known = self._jobs.get(job_id)
        job = check_proof(message, claim, self.server_id, known)
        check_hello(message, self.server_id, job)
        peer = _Peer(job, rank, connection)
        with self._lock:
            if self._jobs.get(job_id) is not job:
                raise HelloRefused(HelloRefusal.UNKNOWN_JOB, f"unknown job {job_id!r}")
            self._machine.now = time.monotonic()
            due = self._machine.connect(job_id, peer, rank, message.first_step, message.epoch)
        if isinstance(due, RankRefusal):
            raise HelloRefused(HelloRefusal(due.cause), due.why)
        connection.show_as(f"{job.name}.rank-{rank}")
        connection.add_closed_callback(lambda error: self._gone(peer, error))
        self._carry_out(due)
        logger.info("job %s: rank %d connected (%s)", job_id, rank, connection.peer)
        welcome = data_plane_pb2.Welcome(
            server_id=self.server_id,
            device=str(self._executor.device),
            kernel=self._executor.kernel.name,
        )
        return bytes(welcome.SerializeToString())

    def submit_local(
        self,
        job_id: str,
        epoch: int,
        tick: Tick,
        inputs: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> LocalReply:
        """Runs the local rank's side of a tick on its own tensors, without copies.

        Args:
            job_id: the job.
            epoch: of the plan that the rank runs.
            tick: which exchange; its plan must have been added.
            inputs, outputs: as :class:`attention_node.open_tick.Source`, by packed row.

        Returns:
            What to wait for.

        Raises:
            TickGivenUp: the server does not run the tick, or under another plan.
        """
        assert self._local_rank is not None
        with self._lock:
            answer = self._machine.local_rows(job_id, epoch, tick)
        open_tick = _taken(answer)
        timer = ExchangeTimer(open_tick, job_id, self._local_rank)
        reply = LocalReply(tick)

        def finish() -> None:
            reply.set_done(record_event(self._executor.device))
            self._exchange_ended(timer.times())

        source = Source(
            inputs=inputs,
            outputs=outputs,
            reply=finish,
            release=lambda: None,
            fail=reply.set_failed,
            written=record_event(self._executor.device),
        )
        self._executor.arrive(open_tick, self._local_rank, source)
        return reply

    def end_local_lane(self, job_id: str, epoch: int, first: Tick) -> None:
        """The local rank sends nothing of the lane of ``first`` any more, from ``first`` on. Does
        nothing if the step is over on this server, was given up, or runs under another plan."""
        assert self._local_rank is not None
        self._decide_soon(self._machine.local_lane_ended, job_id, epoch, self._local_rank, first)

    def abandon(self, job_id: str, rank: int, first_step: int) -> None:
        """Forgets unfinished steps before ``first_step`` in which the local ``rank`` takes part:
        it will not run them to their end."""
        self._decide(self._machine.abandon, job_id, rank, first_step)

    def close(self, reason: str = "the server is shutting down") -> None:
        """Closes every job."""
        for job_id in self.job_ids:
            self.close_job(job_id, reason)

    def _decide(
        self,
        happened: Callable[_Arguments, Instructions[_Peer, ServedStep]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> None:
        """Calls a method of the machine, and carries out what it says."""
        with self._lock:
            self._machine.now = time.monotonic()
            due = happened(*args, **kwargs)
        self._carry_out(due)

    def _decide_soon(
        self,
        happened: Callable[_Arguments, Instructions[_Peer, ServedStep]],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> None:
        """Does so on the executor's thread, between kernel calls."""
        self._executor.run_soon(lambda: self._decide(happened, *args, **kwargs))

    def _carry_out(self, due: Instructions[_Peer, ServedStep]) -> None:
        for each in due:
            match each:
                case instructions.PostReceive(peer, step, tick):
                    self._post(peer, step, tick)
                case instructions.GiveUpTick(step, machine, why):
                    self._executor.give_up(step.open_tick(machine), TickGivenUp(why))
                case instructions.LeaveTick(step, machine, rank):
                    self._executor.leave(step.open_tick(machine), rank)
                case instructions.ReserveMemory(step):
                    self._reserve_memory(step)
                case instructions.ReportStep(step):
                    self._metrics.series.steps_total.inc()
                    self._host.step_finished(step.busy())
                case instructions.CloseConnection(peer, why):
                    peer.connection.close(why)
                case instructions.ReportGone(peer, is_lost):
                    if is_lost:
                        self._host.rank_lost(peer.job.job_id, peer.rank)
                case instructions.RetrySoon():
                    self._decide_soon(self._machine.retry)
                case instructions.ReportWait(seconds):
                    self._metrics.series.memory_wait_seconds_total.inc(seconds)
                case instructions.LogLine(text, level):
                    logger.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)

    def _reserve_memory(self, step: ServedStep) -> None:
        """Before the step's first messages: none of them should wait for an allocation."""
        try:
            self._pool.reserve((self.server_id, step.job.job_id), step.held_bytes())
        except NO_MEMORY as error:
            # Receives are posted one by one, and the first that finds no room tells its rank.
            logger.warning("step %d: no memory to set aside for its messages: %s", step.step, error)

    def _post(self, peer: _Peer, step: ServedStep, tick: Tick) -> None:
        if peer.connection.closed:
            return
        messages = step.messages(peer.rank, tick)
        try:
            buffers = self._memory.take(messages)
        except NO_MEMORY as error:
            peer.fail(tick, self.server_id, error)
            return
        if buffers is None:
            self._decide(self._machine.no_room, peer, tick)
            if self._memory.has_room(messages):
                # It came back before the machine knew that somebody waits for it.
                self._decide(self._machine.memory_freed)
            return
        posting = _Posting(peer, step, tick, *buffers)
        transfer = peer.connection.offer(
            tick.tag(reply=False), posting.request, LANE_DEADLINE_SECONDS
        )
        transfer.add_done_callback(lambda done: self._received(posting, done))

    def _received(self, posting: _Posting, transfer: Transfer) -> None:
        peer, step, tick = posting.peer, posting.step, posting.tick
        job_id = step.job.job_id
        if transfer.state is TransferState.SKIPPED:
            posting.release()
            self._decide_soon(self._machine.lane_skipped, job_id, peer, peer.rank, step, tick)
            return
        if transfer.state is not TransferState.DONE:
            posting.release()
            if isinstance(transfer.error, MessageSizeMismatch):
                self._metrics.series.at(reason="size").stale_messages_total.inc()
            return
        try:
            with self._lock:
                answer = self._machine.rows_arrived(job_id, peer, step, tick)
            open_tick = _taken(answer)
            source = self._remote_source(posting, open_tick, transfer)
        except (TickGivenUp, *NO_MEMORY) as error:
            posting.release()
            if isinstance(error, TickGivenUp):
                self._metrics.series.at(reason="epoch").stale_messages_total.inc()
            peer.fail(tick, self.server_id, error)
            return
        self._executor.arrive(open_tick, peer.rank, source)

    def _remote_source(self, posting: _Posting, open_tick: OpenTick, received: Transfer) -> Source:
        peer, tick, request = posting.peer, posting.tick, posting.request
        timer = ExchangeTimer(open_tick, posting.step.job.job_id, peer.rank)
        messages = posting.step.messages(peer.rank, tick)
        reply = posting.reply or self._pool.acquire(messages.reply.nbytes)

        def send_reply() -> None:
            if messages.owes_reply:
                self._send_reply(peer, tick, reply, received, timer)
            # Soon: when the request's memory has come back.
            self._decide_soon(self._machine.answered, peer, tick)

        def release() -> None:
            request.release()
            reply.release()

        def check() -> None:
            if peer.job.seals(peer.connection):
                verify(request.tensor, tick.tag(reply=False), peer.connection.receiving_key)

        def fail(error: BaseException) -> None:
            if isinstance(error, ChecksumMismatch):
                self._metrics.series.at(reason="checksum").stale_messages_total.inc()
            peer.fail(tick, self.server_id, error)

        return Source(
            inputs=message_views(request.tensor, messages.request),
            outputs=message_views(reply.tensor, messages.reply),
            reply=send_reply,
            release=release,
            fail=fail,
            verify=check,
        )

    def _send_reply(
        self,
        peer: _Peer,
        tick: Tick,
        reply: PooledBuffer,
        received: Transfer,
        timer: ExchangeTimer,
    ) -> None:
        tag = tick.tag(reply=True)
        if peer.job.seals(peer.connection):
            seal(reply.tensor, tag, peer.connection.sending_key)
        transfer = peer.connection.put(
            tag,
            reply,
            self._reply_deadline_seconds,
            ready=launched_work(self._executor.device),
        )
        times = timer.times()

        def has_left(sent: Transfer) -> None:
            with self._lock:
                self._machine.reply_ended()
            if sent.state is TransferState.DONE:
                moving_seconds = received.moving_seconds + sent.moving_seconds
                self._exchange_ended(replace(times, transport_seconds=moving_seconds))

        with self._lock:
            self._machine.reply_begun()
        transfer.add_done_callback(has_left)

    def _exchange_ended(self, times: ExchangeTimes) -> None:
        self._metrics.exchange_ended(times)
        if tracing.enabled():
            tracing.record(
                "distca.tick",
                times.job_id,
                times.tick.step,
                began_at=times.began_at,
                ended_at=times.began_at + times.wait_seconds + times.kernel_seconds,
                server=self.server_id,
                rank=times.rank,
                layer=times.tick.layer,
                nano_batch=times.tick.nano_batch,
                phase=str(times.tick.phase),
                kernel_seconds=times.kernel_seconds,
                transport_seconds=times.transport_seconds or 0.0,
            )

    def _tick_over(self, step: ServedStep, open_tick: OpenTick) -> None:
        failure = "" if open_tick.failure is None else str(open_tick.failure)
        self._decide(self._machine.tick_over, step.job.job_id, step, open_tick.tick, failure)

    def _gone(self, peer: _Peer, error: TransportError | None) -> None:
        with self._lock:
            self._machine.now = time.monotonic()
            due = self._machine.disconnect(peer, was_reset=isinstance(error, PeerReset))
        if not due:
            return
        has_left = error is None or (isinstance(error, PeerClosed) and error.finished)
        logger.log(
            logging.INFO if has_left else logging.WARNING,
            "job %s: rank %d disconnected%s",
            peer.job.job_id,
            peer.rank,
            f": {error}" if error else "",
        )
        self._carry_out(due)


def _taken(answer: Answer[ServedStep]) -> OpenTick:
    """The tick that is to take the rows that arrived.

    Raises:
        TickGivenUp: there is none; says why.
    """
    if isinstance(answer, str):
        raise TickGivenUp(answer)
    step, tick = answer
    return step.open_tick(tick)
