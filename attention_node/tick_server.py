"""Serves ticks: posts receives ahead of the data, hands messages to the executor, sends replies.

The same class serves a pool node and a trainer's in-place server. It is driven by three kinds of
threads, none of which it blocks: the transport's (accept, message done), the executor's (reply,
release), and whoever brings plans. One lock guards the bookkeeping; no callback is made under it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from attention_node.cuda_order import launched_work, record_event
from attention_node.executor import Executor
from attention_node.hello import (
    FAREWELL,
    HelloRefusal,
    HelloRefused,
    check_hello,
    check_proof,
    parse_hello,
)
from attention_node.memory_gate import MemoryGate
from attention_node.open_tick import OpenTick, Source, TickGivenUp
from attention_node.residence import LocalReply, Residence
from attention_node.served_job import (
    ExchangeTimes,
    JobDescription,
    Lane,
    ServedJob,
    ServedStep,
    StepBusy,
)
from attention_node.tick_memory import MemoryTooSmall
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
from distca.process import tracing
from distca.v1 import data_plane_pb2

logger = logging.getLogger(__name__)

NO_MEMORY = (BufferPoolExhausted, DriverError, MemoryError, torch.OutOfMemoryError)
"""What a buffer pool raises when it has no room, or the device gives it none."""

LOST_RANK_SECONDS = 60.0
"""After so long the loss of a rank's connection says nothing of the rank any more: plans may have
left this server out since."""

LANE_DEADLINE_SECONDS = 24 * 3600.0
"""A posted receive waits for as long as its trainer computes, evaluates or saves. When the trainer
dies, its connection ends it; when it hangs, its lease: the control plane closes the job."""


@dataclass(eq=False)
class _RankConnection:
    """A trainer rank that is connected, and the lanes of its ticks."""

    job: ServedJob
    rank: int
    connection: Connection
    first_step: int
    epoch: int
    lanes: list[Lane] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class _Posting:
    """A receive to post, or posted: which tick, and its buffers.

    Attributes:
        reply: None if it is taken when the request is here.
    """

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
    """

    def __init__(
        self,
        server_id: str,
        executor: Executor,
        pool: BufferPool,
        *,
        local_rank: int | None = None,
        reply_deadline_seconds: float = 120.0,
        on_step_finished: Callable[[StepBusy], None] = lambda busy: None,
        on_refused: Callable[[HelloRefusal], None] = lambda reason: None,
        on_message_refused: Callable[[str], None] = lambda reason: None,
        on_waited: Callable[[float], None] = lambda seconds: None,
        on_exchange: Callable[[ExchangeTimes], None] = lambda times: None,
        on_accepted: Callable[[Connection, str], None] = lambda connection, name: None,
        on_rank_lost: Callable[[str, int], None] = lambda job_id, rank: None,
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
        self._lock = threading.RLock()
        self._jobs: dict[str, ServedJob] = {}
        self._connections: list[_RankConnection] = []
        # Ranks whose connection was reset and that have made no other: when, by job and rank.
        self._lost_ranks: dict[tuple[str, int], float] = {}
        self._leaving: set[Transfer] = set()
        self._gate: MemoryGate[_RankConnection] = MemoryGate(
            pool,
            live_steps=self._live_steps,
            post=self._post,
            run_soon=executor.run_soon,
            on_waited=on_waited,
        )

    @property
    def open_ticks(self) -> int:
        """Ticks of which some messages have arrived."""
        with self._lock:
            return sum(
                len(step.open_ticks) for job in self._jobs.values() for step in job.steps.values()
            )

    @property
    def job_ids(self) -> list[str]:
        """The open jobs."""
        with self._lock:
            return list(self._jobs)

    @property
    def lost_ranks(self) -> list[tuple[str, int]]:
        """Jobs and ranks whose connection was reset of late, and that have made no other."""
        since = time.monotonic() - LOST_RANK_SECONDS
        with self._lock:
            return [key for key, at in self._lost_ranks.items() if at > since]

    @property
    def idle(self) -> bool:
        """Whether no planned step is unfinished and every reply has left."""
        with self._lock:
            return not self._leaving and not any(job.steps for job in self._jobs.values())

    def is_serving(self, last_step: int) -> bool:
        """Whether a step up to ``last_step`` is unfinished, or a reply has not left yet."""
        with self._lock:
            return bool(self._leaving) or any(
                step <= last_step for job in self._jobs.values() for step in job.steps
            )

    def open_job(self, description: JobDescription) -> None:
        """Admits a job; its trainers may connect from now on."""
        with self._lock:
            self._jobs.setdefault(description.job_id, ServedJob(description))
        logger.info("job %s opened", description.job_id)

    def add_plan(
        self,
        job_id: str,
        plan: Plan,
        *,
        forward_only: bool,
        first_tick: Int64Array | None = None,
    ) -> None:
        """Takes in the plan of a step, and posts receives for it where nothing comes before. A
        plan that came already (by step and epoch), or that a recovery has made void, is ignored.
        One of a higher epoch than the step's plan so far tells of a recovery.

        Args:
            job_id: the job.
            plan: this server's slice.
            forward_only: the step has no backward pass.
            first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.

        Raises:
            KeyError: no such job is open.
        """
        with self._lock:
            job = self._jobs[job_id]
            before = job.steps.get(plan.step)
            oldest = max(job.epoch, before.epoch if before else 0)
            if plan.epoch < oldest or not job.is_new(plan):
                return
        if before is not None:
            # Receives of the former plan are on offer under the same tags: the ranks that sent by
            # it connect again, as after any recovery.
            self.recover(job_id, plan.epoch)
        step = ServedStep(
            job.description,
            plan,
            first_tick=first_tick,
            server_id=self.server_id,
            local_rank=self._local_rank,
            forward_only=forward_only,
            device=self._executor.device,
            lock=self._lock,
            on_finished=self._finish_step,
            on_tick_over=lambda step, tick: self._gate.tick_over(job_id, tick),
        )
        if step.finished or not self._has_memory_for(job, step):
            return
        step.prepare(self._executor.kernel)
        self._reserve_memory(job_id, step)
        with self._lock:
            # A recovery may have begun while the routes were derived.
            if plan.epoch < job.epoch:
                return
            job.steps[step.step] = step
            connected = [c for c in self._connections if c.job is job]
            for connection in connected:
                self._extend(connection, step)
        for connection in connected:
            self._post(connection)

    def recover(self, job_id: str, epoch: int) -> None:
        """Drops the steps and connections of a job whose epoch is below ``epoch``, and takes in no
        more of them. Does nothing if the job is unknown or has recovered so far already."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None or epoch <= job.epoch:
                return
            job.epoch = epoch
            job.refused = {key: why for key, why in job.refused.items() if key[0] >= epoch}
            why = f"job {job_id} recovers with epoch {epoch}"
            void = [number for number, step in job.steps.items() if step.epoch < epoch]
            open_ticks = [tick for number in void for tick in job.steps.pop(number).give_up(why)]
            cut = [c for c in self._connections if c.job is job and c.epoch < epoch]
            self._connections = [c for c in self._connections if c not in cut]
        logger.info("%s: %d steps and %d connections dropped", why, len(void), len(cut))
        for connection in cut:
            connection.connection.close(why)
        self._give_up(open_ticks, why)
        self._gate.changed()

    def close_job(self, job_id: str, reason: str) -> None:
        """Forgets a job: its connections are closed and its open ticks given up."""
        with self._lock:
            job = self._jobs.pop(job_id, None)
            if job is None:
                return
            for key in [key for key in self._lost_ranks if key[0] == job_id]:
                del self._lost_ranks[key]
            connected = [c for c in self._connections if c.job is job]
            self._connections = [c for c in self._connections if c.job is not job]
            why = f"job {job_id} was closed: {reason or 'finished'}"
            open_ticks = [tick for step in job.steps.values() for tick in step.give_up(why)]
        logger.info("%s", why)
        for connected_rank in connected:
            connected_rank.connection.close(why)
        self._give_up(open_ticks, why)
        self._pool.forget((self.server_id, job_id))
        self._gate.changed()

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
        with self._lock:
            job = self._jobs.get(message.job_id)
        job = check_proof(message, claim, self.server_id, job)
        with self._lock:
            check_hello(message, self.server_id, job)
        # A rank may hear of a recovery before this server does.
        self.recover(message.job_id, message.epoch)
        with self._lock:
            check_hello(message, self.server_id, job)
            if self._jobs.get(message.job_id) is not job:
                raise HelloRefused(HelloRefusal.UNKNOWN_JOB, f"unknown job {message.job_id!r}")
            rank_connection = _RankConnection(
                job, message.rank, connection, message.first_step, message.epoch
            )
            rank_connection.lanes = [Lane() for _ in range(job.description.n_nano_batches)]
            self._connections.append(rank_connection)
            self._lost_ranks.pop((message.job_id, message.rank), None)
            dropped = self._drop_abandoned(job, message.rank, message.first_step)
            for number in sorted(job.steps):
                self._extend(rank_connection, job.steps[number])
        self._give_up(*dropped)
        self._on_accepted(connection, f"{job.description.name}.rank-{message.rank}")
        connection.add_closed_callback(lambda error: self._forget(rank_connection, error))
        self._post(rank_connection)
        logger.info("job %s: rank %d connected (%s)", message.job_id, message.rank, connection.peer)
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
            TickGivenUp: the job was closed, or the step is over on this server, was given up, or
                runs under another plan.
        """
        assert self._local_rank is not None
        with self._lock:
            job = self._jobs.get(job_id)
            step = job.steps.get(tick.step) if job else None
            if step is None or step.epoch != epoch:
                raise TickGivenUp(
                    f"{tick}: the step is over on this process's own server, or another rank has "
                    "given it up"
                )
            open_tick = step.open_tick(tick)
        residence = Residence(open_tick, job_id, self._local_rank)
        reply = LocalReply(tick)

        def finish() -> None:
            reply.set_done(record_event(self._executor.device))
            self._exchange_ended(residence.times())

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
        with self._lock:
            job = self._jobs.get(job_id)
            step = job.steps.get(first.step) if job else None
        if step is not None and step.epoch == epoch:
            rank, served = self._local_rank, step
            self._executor.run_soon(lambda: self._give_up_stuck(served.end_lane(rank, first)))

    def abandon(self, job_id: str, rank: int, first_step: int) -> None:
        """Forgets unfinished steps before ``first_step`` in which the local ``rank`` takes part:
        it will not run them to their end."""
        with self._lock:
            job = self._jobs.get(job_id)
            if job is None:
                return
            dropped = self._drop_abandoned(job, rank, first_step)
        self._give_up(*dropped)

    def close_all(self, reason: str) -> None:
        """Closes every job."""
        for job_id in self.job_ids:
            self.close_job(job_id, reason)

    def close(self) -> None:
        """Closes every job."""
        self.close_all("the server is shutting down")

    def _drop_abandoned(
        self, job: ServedJob, rank: int, first_step: int
    ) -> tuple[list[OpenTick], str]:
        """Forgets the unfinished steps that ``rank`` takes part in and will not go on with;
        returns their open ticks and why."""
        why = f"rank {rank} did not run the step to its end, it went on with step {first_step}"
        dropped = []
        for number, step in list(job.steps.items()):
            if number < first_step and step.has_rank(rank):
                dropped.extend(job.steps.pop(number).give_up(why))
        return dropped, why

    def _give_up(self, ticks: list[OpenTick], why: str) -> None:
        for tick in ticks:
            self._executor.give_up(tick, TickGivenUp(why))

    def _live_steps(self) -> list[tuple[str, int]]:
        with self._lock:
            return [(job_id, step) for job_id, job in self._jobs.items() for step in job.steps]

    def _has_memory_for(self, job: ServedJob, step: ServedStep) -> bool:
        """Whether ``step`` can be served; if not, its ranks are told why."""
        try:
            self._gate.add_step(job.description.job_id, step.message_bytes())
        except MemoryTooSmall as error:
            why = f"step {step.step} cannot be served by {self.server_id}: {error}"
            logger.error("%s", why)
            with self._lock:
                job.refused[step.epoch, step.step] = why
                cut = [c for c in self._connections if c.job is job and step.has_rank(c.rank)]
            for connection in cut:
                connection.connection.close(why)
            return False
        return True

    def _reserve_memory(self, job_id: str, step: ServedStep) -> None:
        """Before the step's first messages: none of them should wait for an allocation."""
        try:
            self._pool.reserve((self.server_id, job_id), step.held_bytes())
        except NO_MEMORY as error:
            # Receives are posted one by one, and the first that finds no room tells its rank.
            logger.warning("step %d: no memory to set aside for its messages: %s", step.step, error)

    def _extend(self, connection: _RankConnection, step: ServedStep) -> None:
        if step.step >= connection.first_step and step.epoch >= connection.epoch:
            for nano_batch, lane in enumerate(connection.lanes):
                lane.extend(step, connection.rank, nano_batch)

    def _post(self, connection: _RankConnection) -> None:
        """Posts the receives of all ticks that may come now."""
        for lane in connection.lanes:
            while not connection.connection.closed:
                posting = self._next_posting(connection, lane)
                if posting is None:
                    break
                self._offer(connection, lane, posting)

    def _next_posting(self, connection: _RankConnection, lane: Lane) -> _Posting | None:
        """The next receive of ``lane`` with its memory; None if none is to be posted, or if there
        is no memory: then the gate posts for the connection again."""
        with self._lock:
            following = lane.next_to_post()
            if following is None:
                return None
            step, tick = following.step, following.tick
            messages = step.messages(connection.rank, tick)
            try:
                buffers = self._gate.take(
                    step.job.job_id,
                    tick,
                    (messages.request.nbytes, messages.reply.nbytes),
                    connection,
                    idle=len(lane.under_way) == 1,
                )
            except NO_MEMORY as error:
                self._fail(connection, tick, error)
                return None
            if buffers is None:
                lane.put_back(following)
                return None
            return _Posting(step, tick, *buffers)

    def _offer(self, connection: _RankConnection, lane: Lane, posting: _Posting) -> None:
        transfer = connection.connection.offer(
            posting.tick.tag(reply=False), posting.request, LANE_DEADLINE_SECONDS
        )
        transfer.add_done_callback(lambda done: self._received(connection, lane, posting, done))

    def _received(
        self,
        connection: _RankConnection,
        lane: Lane,
        posting: _Posting,
        transfer: Transfer,
    ) -> None:
        step, tick = posting.step, posting.tick
        if transfer.state is TransferState.SKIPPED:
            posting.release()
            self._executor.run_soon(lambda: self._end_lane(connection, lane, posting))
            return
        if transfer.state is not TransferState.DONE:
            posting.release()
            if isinstance(transfer.error, MessageSizeMismatch):
                self._on_message_refused("size")
            return
        try:
            open_tick = step.open_tick(tick)
            source = self._remote_source(connection, lane, posting, open_tick, transfer)
        except (TickGivenUp, *NO_MEMORY) as error:
            posting.release()
            if isinstance(error, TickGivenUp):
                self._on_message_refused("epoch")
            self._fail(connection, tick, error)
            return
        self._executor.arrive(open_tick, connection.rank, source)

    def _end_lane(self, connection: _RankConnection, lane: Lane, posting: _Posting) -> None:
        """The rank sends nothing of the lane any more in the posting's step."""
        with self._lock:
            lane.end(posting.step)
        self._give_up_stuck(posting.step.end_lane(connection.rank, posting.tick))
        self._post(connection)

    def _give_up_stuck(self, stuck: list[tuple[OpenTick, TickGivenUp]]) -> None:
        for tick, why in stuck:
            self._executor.give_up(tick, why)

    def _follow(self, connection: _RankConnection, lane: Lane, tick: Tick) -> None:
        """``tick`` has been answered: the rank may send the one behind it."""
        with self._lock:
            lane.under_way.pop(tick, None)
        self._post(connection)

    def _fail(self, connection: _RankConnection, tick: Tick, error: BaseException) -> None:
        """Tells a rank that it gets no result of ``tick``."""
        logger.warning("%s of rank %d: %s", tick, connection.rank, error)
        connection.connection.close(f"{tick} failed on server {self.server_id}: {error}")

    def _remote_source(
        self,
        connection: _RankConnection,
        lane: Lane,
        posting: _Posting,
        open_tick: OpenTick,
        received: Transfer,
    ) -> Source:
        step, tick, request = posting.step, posting.tick, posting.request
        residence = Residence(open_tick, step.job.job_id, connection.rank)
        messages = step.messages(connection.rank, tick)
        reply = posting.reply or self._pool.acquire(messages.reply.nbytes)

        def send_reply() -> None:
            if messages.owes_reply:
                seal(
                    reply.tensor,
                    messages.reply,
                    tick.tag(reply=True),
                    connection.connection.sending_key,
                )
                transfer = connection.connection.put(
                    tick.tag(reply=True),
                    reply,
                    self._reply_deadline_seconds,
                    ready=launched_work(self._executor.device),
                )
                times = residence.times()
                with self._lock:
                    self._leaving.add(transfer)
                transfer.add_done_callback(lambda sent: self._has_left(sent, received, times))
            # Soon: when the request's memory has come back.
            self._executor.run_soon(lambda: self._follow(connection, lane, tick))

        def release() -> None:
            request.release()
            reply.release()

        def fail(error: BaseException) -> None:
            if isinstance(error, ChecksumMismatch):
                self._on_message_refused("checksum")
            self._fail(connection, tick, error)

        return Source(
            inputs=message_views(request.tensor, messages.request),
            outputs=message_views(reply.tensor, messages.reply),
            reply=send_reply,
            release=release,
            fail=fail,
            verify=lambda: verify(
                request.tensor,
                messages.request,
                tick.tag(reply=False),
                connection.connection.receiving_key,
            ),
        )

    def _has_left(self, reply: Transfer, request: Transfer, times: ExchangeTimes) -> None:
        with self._lock:
            self._leaving.discard(reply)
        if reply.state is TransferState.DONE:
            moving_seconds = request.moving_seconds + reply.moving_seconds
            self._exchange_ended(replace(times, transport_seconds=moving_seconds))

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

    def _finish_step(self, step: ServedStep) -> None:
        """Runs on the executor's thread when the last tick of a step is over or one failed."""
        with self._lock:
            job = self._jobs.get(step.job.job_id)
            if job is None or job.steps.get(step.step) is not step:
                return
            del job.steps[step.step]
        if not step.given_up:
            self._on_step_finished(step.busy())

    def _forget(self, connection: _RankConnection, error: TransportError | None) -> None:
        with self._lock:
            if connection not in self._connections:
                return
            self._connections.remove(connection)
            job_id, rank = connection.job.description.job_id, connection.rank
            is_lost = isinstance(error, PeerReset) and not any(
                other.job is connection.job and other.rank == rank for other in self._connections
            )
            if is_lost:
                self._lost_ranks[job_id, rank] = time.monotonic()
        self._gate.changed()
        has_left = error is None or (isinstance(error, PeerClosed) and error.said == FAREWELL)
        logger.log(
            logging.INFO if has_left else logging.WARNING,
            "job %s: rank %d disconnected%s",
            job_id,
            rank,
            f": {error}" if error else "",
        )
        if is_lost:
            self._on_rank_lost(job_id, rank)
