"""Serves ticks: posts receives ahead of the data, hands messages to the executor, sends replies.

The same class serves a pool node and a trainer's in-place server. It is driven by three kinds of
threads, none of which it blocks: the transport's (accept, message done), the executor's (reply,
release), and whoever brings plans. What to do is decided by a ``ServerMachine``; its lock is held
for the decision alone, never while an instruction is carried out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

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
from attention_node.machine import events, instructions
from attention_node.machine.server import Instructions, ServerMachine
from attention_node.message_memory import MessageMemory
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
"""What a buffer pool raises when it has no room, or the device gives it none."""

EdgeAccept: TypeAlias = Callable[[int, Sequence[int], Connection], Sequence[int]]
"""Takes a rank, tags that it has received, and its connection; gives the tags received here."""

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
        """Tells the rank that it gets no result of ``tick``."""
        logger.warning("%s of rank %d: %s", tick, self.rank, error)
        self.connection.close(f"{tick} failed on server {server_id}: {error}")


_Event: TypeAlias = events.Event[_Peer, ServedStep]
_Instructions: TypeAlias = Instructions[_Peer, ServedStep]


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


class TickServer:
    """Receives requests, runs them on the executor, sends replies.

    Args:
        server_id: the server's name in plans.
        executor: runs the tasks.
        pool: buffers for messages.
        local_rank: the rank whose process this is, or None.
        reply_deadline_seconds: a reply that a trainer does not take for so long fails its
            connection.
        on_step_finished: called with the busy seconds of each finished step.
        on_refused: called with the reason of each hello that is refused.
        on_message_refused: called with the reason of each message that is not used: one of
            ``attention_node.metrics.STALE_REASONS``.
        on_waited: called with seconds for which a rank's next message was not received because
            memory for it was missing.
        on_exchange: called when a rank's part of a tick is over, on the thread that ended it.
        on_accepted: called with each connection and the name of the rank behind it.
        on_rank_lost: called with job and rank of a connection that was reset.
        on_edge_keys: called with each connection for edge keys: the rank behind it, tags that it
            has received, and the connection; gives the tags received here. None: such connections
            are refused.
    """

    def __init__(
        self,
        server_id: str,
        executor: Executor,
        pool: BufferPool,
        *,
        local_rank: int | None = None,
        reply_deadline_seconds: float = default_seconds("reply_timeout_seconds"),
        on_step_finished: Callable[[StepBusy], None] = lambda busy: None,
        on_refused: Callable[[HelloRefusal], None] = lambda reason: None,
        on_message_refused: Callable[[str], None] = lambda reason: None,
        on_waited: Callable[[float], None] = lambda seconds: None,
        on_exchange: Callable[[ExchangeTimes], None] = lambda times: None,
        on_accepted: Callable[[Connection, str], None] = lambda connection, name: None,
        on_rank_lost: Callable[[str, int], None] = lambda job_id, rank: None,
        on_edge_keys: EdgeAccept | None = None,
    ) -> None:
        self.server_id = server_id
        self._executor = executor
        self._pool = pool
        self._local_rank = local_rank
        self._reply_deadline_seconds = reply_deadline_seconds
        self._on_step_finished = on_step_finished
        self._on_refused = on_refused
        self._on_message_refused = on_message_refused
        self._on_exchange = on_exchange
        self._on_accepted = on_accepted
        self._on_rank_lost = on_rank_lost
        self._on_waited = on_waited
        self._on_edge_keys = on_edge_keys
        self._lock = threading.Lock()
        self._machine: ServerMachine[_Peer, ServedStep] = ServerMachine(server_id, pool.limit_bytes)
        self._jobs: dict[str, JobDescription] = {}
        self._memory = MessageMemory(pool, lambda: self._handle(events.MemoryFreed()))

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
            return self._machine.lost_ranks(time.monotonic())

    @property
    def has_ranks(self) -> bool:
        """Whether a rank is connected."""
        with self._lock:
            return self._machine.has_ranks

    @property
    def idle(self) -> bool:
        """Whether no planned step is unfinished and every reply has left."""
        with self._lock:
            return self._machine.idle

    def is_serving(self, last_step: int) -> bool:
        """Whether a step up to ``last_step`` is unfinished, or a reply has not left yet."""
        with self._lock:
            return self._machine.is_serving(last_step)

    def open_job(self, description: JobDescription) -> None:
        """Admits a job; its trainers may connect from now on."""
        job_id = description.job_id
        with self._lock:
            self._jobs.setdefault(job_id, description)
            self._machine.handle(
                events.JobOpened(job_id, description.n_nano_batches, description.order),
                time.monotonic(),
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
        One of a higher epoch than the step's plan so far tells of a recovery.

        Args:
            job_id: the job.
            plan: this server's slice.
            forward_only: the step has no backward pass.
            first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.
        """
        with self._lock:
            job, now = self._jobs.get(job_id), time.monotonic()
            came = events.PlanCame(job_id, plan.step, plan.epoch)
            if job is None or not self._machine.handle(came, now):
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
        self._handle(events.StepPlanned(job_id, step, step.outline))

    def recover(self, job_id: str, epoch: int) -> None:
        """Drops the steps and connections of a job whose epoch is below ``epoch``, and takes in no
        more of them. Does nothing if the job is unknown or has recovered so far already."""
        self._handle(events.JobRecovered(job_id, epoch))

    def close_job(self, job_id: str, reason: str) -> None:
        """Forgets a job: its connections are closed and its open ticks given up."""
        with self._lock:
            self._jobs.pop(job_id, None)
            due = self._machine.handle(events.JobClosed(job_id, reason), time.monotonic())
        self._carry_out(due)
        self._pool.forget((self.server_id, job_id))

    def accept(self, claim: Claim, connection: Connection) -> bytes:
        """The transport's accept callback: admits a rank of an open job.

        Raises:
            HelloRefused: the hello is malformed, of another version or an epoch that is over, for
                another server or an unknown job, without the proof that it is the rank's, or names
                a rank that the job does not have.
        """
        try:
            return self._admit(claim, connection)
        except HelloRefused as refused:
            self._on_refused(refused.reason)
            raise

    def _admit(self, claim: Claim, connection: Connection) -> bytes:
        message = parse_hello(claim.hello)
        job_id, rank = message.job_id, message.rank
        with self._lock:
            known = self._jobs.get(job_id)
        job = check_proof(message, claim, self.server_id, known)
        check_hello(message, self.server_id, job)
        if message.edge_keys:
            return self._admit_edge_keys(message, connection)
        peer = _Peer(job, rank, connection)
        connected = events.RankConnected(job_id, peer, rank, message.first_step, message.epoch)
        with self._lock:
            if self._jobs.get(job_id) is not job:
                raise HelloRefused(HelloRefusal.UNKNOWN_JOB, f"unknown job {job_id!r}")
            due = self._machine.handle(connected, time.monotonic())
        for each in due:
            if isinstance(each, instructions.RefuseRank):
                raise HelloRefused(HelloRefusal(each.cause), each.why)
        self._on_accepted(connection, f"{job.name}.rank-{rank}")
        connection.add_closed_callback(lambda error: self._gone(peer, error))
        self._carry_out(due)
        logger.info("job %s: rank %d connected (%s)", job_id, rank, connection.peer)
        return self._welcome()

    def _admit_edge_keys(self, message: data_plane_pb2.Hello, connection: Connection) -> bytes:
        """Hands the connection of a rank that has proven itself to the rank of this process."""
        if self._on_edge_keys is None or message.rank == self._local_rank:
            raise HelloRefused(
                HelloRefusal.SERVER,
                f"rank {message.rank} has edge keys for {self.server_id!r}, which is the server of "
                "no other rank's process; edge keys are exchanged between ranks",
            )
        self._on_accepted(connection, f"{message.job_id}.rank-{message.rank}")
        return self._welcome(self._on_edge_keys(message.rank, message.received_tags, connection))

    def _welcome(self, received_tags: Sequence[int] = ()) -> bytes:
        welcome = data_plane_pb2.Welcome(
            server_id=self.server_id,
            device=str(self._executor.device),
            kernel=self._executor.kernel.name,
            received_tags=received_tags,
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
            TickGivenUp: the job was closed, or the step is over on this server, was given up, or
                runs under another plan.
        """
        assert self._local_rank is not None
        open_tick = self._take(self._decide(events.LocalRows(job_id, epoch, tick)))
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
        self._handle_soon(events.LocalLaneEnded(job_id, epoch, self._local_rank, first))

    def abandon(self, job_id: str, rank: int, first_step: int) -> None:
        """Forgets unfinished steps before ``first_step`` in which the local ``rank`` takes part:
        it will not run them to their end."""
        self._handle(events.StepsAbandoned(job_id, rank, first_step))

    def close_all(self, reason: str) -> None:
        """Closes every job."""
        for job_id in self.job_ids:
            self.close_job(job_id, reason)

    def close(self) -> None:
        """Closes every job."""
        self.close_all("the server is shutting down")

    def _decide(self, event: _Event) -> _Instructions:
        with self._lock:
            return self._machine.handle(event, time.monotonic())

    def _handle(self, event: _Event) -> None:
        self._carry_out(self._decide(event))

    def _handle_soon(self, event: _Event) -> None:
        """On the executor's thread, between kernel calls."""
        self._executor.run_soon(lambda: self._handle(event))

    def _carry_out(self, due: _Instructions) -> None:
        for each in due:
            match each:
                case instructions.PostReceive(peer, step, tick):
                    self._post(peer, step, tick)
                case instructions.GiveUpTick(step, machine, why):
                    self._executor.give_up(step.open_tick(machine), TickGivenUp(why))
                case instructions.ReserveMemory(step):
                    self._reserve_memory(step)
                case instructions.ReportStep(step):
                    self._on_step_finished(step.busy())
                case instructions.CloseConnection(peer, why):
                    peer.connection.close(why)
                case instructions.ReportGone(peer, is_lost):
                    if is_lost:
                        self._on_rank_lost(peer.job.job_id, peer.rank)
                case instructions.RetrySoon():
                    self._handle_soon(events.RetryDue())
                case instructions.ReportWait(seconds):
                    self._on_waited(seconds)
                case instructions.ReportOverload():
                    logger.warning(
                        "overloaded: messages wait at their senders for memory (limit_bytes=%d, "
                        "%d in use)",
                        self._pool.limit_bytes,
                        self._pool.stats().in_use_bytes,
                    )
                case instructions.ReportCalm(seconds):
                    logger.info("no longer overloaded, after %.0f s", seconds)
                case instructions.Note(text, is_error):
                    logger.log(logging.ERROR if is_error else logging.INFO, "%s", text)

    def _take(self, answer: _Instructions) -> OpenTick:
        """The tick that is to take the rows that arrived.

        Raises:
            TickGivenUp: there is none; says why.
        """
        (each,) = answer
        if isinstance(each, instructions.TakeRows):
            return each.step.open_tick(each.tick)
        assert isinstance(each, instructions.RefuseRows)
        raise TickGivenUp(each.why)

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
            self._handle(events.NoRoom(peer, tick))
            if self._memory.has_room(messages):
                # It came back before the machine knew that somebody waits for it.
                self._handle(events.MemoryFreed())
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
            self._handle_soon(events.LaneSkipped(job_id, peer, peer.rank, step, tick))
            return
        if transfer.state is not TransferState.DONE:
            posting.release()
            if isinstance(transfer.error, MessageSizeMismatch):
                self._on_message_refused("size")
            return
        try:
            open_tick = self._take(self._decide(events.RowsArrived(job_id, peer, step, tick)))
            source = self._remote_source(posting, open_tick, transfer)
        except (TickGivenUp, *NO_MEMORY) as error:
            posting.release()
            if isinstance(error, TickGivenUp):
                self._on_message_refused("epoch")
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
            self._handle_soon(events.Answered(peer, tick))

        def release() -> None:
            request.release()
            reply.release()

        def check() -> None:
            if peer.job.seals(peer.connection):
                verify(request.tensor, tick.tag(reply=False), peer.connection.receiving_key)

        def fail(error: BaseException) -> None:
            if isinstance(error, ChecksumMismatch):
                self._on_message_refused("checksum")
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
            self._handle(events.ReplyEnded())
            if sent.state is TransferState.DONE:
                moving_seconds = received.moving_seconds + sent.moving_seconds
                self._exchange_ended(replace(times, transport_seconds=moving_seconds))

        self._handle(events.ReplyBegun())
        transfer.add_done_callback(has_left)

    def _exchange_ended(self, times: ExchangeTimes) -> None:
        self._on_exchange(times)
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
        failure = open_tick.failure
        self._handle(
            events.TickOver(
                step.job.job_id, step, open_tick.tick, "" if failure is None else str(failure)
            )
        )

    def _gone(self, peer: _Peer, error: TransportError | None) -> None:
        due = self._decide(events.RankGone(peer, isinstance(error, PeerReset)))
        if not any(isinstance(each, instructions.ReportGone) for each in due):
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
