"""A server's jobs, steps, connections, lanes and epochs: a method for each thing that can happen.

A method takes in what has happened and returns what is to be done. In the order of a step:
``open_job``, ``wants_plan``, ``step_planned``, ``connect``; for each tick of a rank
``rows_arrived`` or ``local_rows``, ``reply_begun``, ``reply_ended``, ``answered`` and
``tick_over``; at any time ``disconnect``, ``recover`` and ``close_job``, and with limited memory
``no_room``, ``memory_freed`` and ``retry``.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, Literal, NamedTuple, TypeAlias

from attention_node.machine.back_pressure import BackPressure
from attention_node.machine.instructions import (
    CloseConnection,
    GiveUpTick,
    Instruction,
    LeaveTick,
    LogLine,
    PostReceive,
    ReportGone,
    ReportStep,
    ReserveMemory,
)
from attention_node.machine.lane import ExpectedTick, RankLane
from attention_node.machine.outline import Peer, StepOutline, Work
from attention_node.machine.step import ServedTicks
from attention_node.machine.tick import TickMachine
from attention_node.machine.tick_memory import Lane as MemoryLane
from attention_node.machine.tick_memory import MemoryTooSmall
from attention_node.machine.turns import Turns
from core_attention.tick import Tick
from core_attention.tick_order import TickOrder

LOST_RANK_SECONDS = 60.0
"""After so long the loss of a rank's connection says nothing of the rank any more: plans may have
left this server out since."""

REMEMBERED_PLANS = 4096
"""Plans of a job that a server knows as seen. A control plane repeats
those of unfinished steps only, of which it keeps far fewer."""

Instructions: TypeAlias = list[Instruction[Peer, Work]]
"""The things to do, in this order, without holding a lock."""

Answer: TypeAlias = tuple[Work, TickMachine] | str
"""The step and the tick that take rows; or why the rows are refused."""


class RankRefusal(NamedTuple):
    """The reason why a rank is not welcome."""

    cause: Literal["unknown-job", "memory", "epoch"]
    why: str


@dataclass(eq=False)
class _Job(Generic[Work]):
    """A job on one server.

    Attributes:
        order: in which ranks come to their ticks, if they form pipelines.
        head_groups: ticks of a call, which ranks send together.
        epoch: of the last recovery; plans and connections of lower epochs are void.
        steps: planned and unfinished steps, by number.
        refused: why steps cannot be served, by epoch and number.
        seen: the (step, epoch) of plans that have come, oldest first.
    """

    job_id: str
    n_nano_batches: int
    order: TickOrder | None = None
    head_groups: int = 1
    epoch: int = 0
    steps: dict[int, ServedTicks[Work]] = field(default_factory=dict)
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    seen: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)

    def is_new(self, step: int, epoch: int) -> bool:
        """Returns whether a plan comes for the first time; a stream that is watched again repeats
        the plans of unfinished steps."""
        if (step, epoch) in self.seen:
            return False
        self.seen[step, epoch] = None
        while len(self.seen) > REMEMBERED_PLANS:
            self.seen.popitem(last=False)
        return True

    def memory_lane(self, rank: int, tick: Tick) -> MemoryLane:
        """The lane that the memory of ``rank``'s messages of ``tick`` is counted in."""
        return tick.nano_batch if self.order is None else (rank, self.order.row(tick))


@dataclass(eq=False)
class _ServedRank(Generic[Work]):
    """A trainer rank that is connected, and the lanes of its ticks.

    Attributes:
        turns: the same ticks by action, in a job with pipelines.
    """

    job: _Job[Work]
    rank: int
    first_step: int
    epoch: int
    lanes: list[RankLane[Work]]
    turns: Turns = field(default_factory=Turns)

    def extend(self, ticks: ServedTicks[Work]) -> None:
        """Expects the rank's ticks of a step, if the rank is to run it."""
        outline = ticks.outline
        if outline.step < self.first_step or outline.epoch < self.epoch:
            return
        for nano_batch, lane in enumerate(self.lanes):
            of_lane = outline.lanes.get(nano_batch, {})
            entries = [
                self._expected(ticks, tick, self.rank in each.owed)
                for tick, each in of_lane.items()
                if self.rank in each.before_reply
            ]
            lane.extend(outline.step, entries)
            for entry in entries:
                if entry.latest is not None:
                    self.turns.expect(entry.latest)

    def over(self, entry: ExpectedTick[Work]) -> None:
        """A tick is answered, or will not come."""
        if entry.latest is not None:
            self.turns.over(entry.latest)

    def _expected(
        self, ticks: ServedTicks[Work], tick: Tick, owes_reply: bool
    ) -> ExpectedTick[Work]:
        if self.job.order is None:
            return ExpectedTick(ticks, tick, owes_reply)
        turn = self.job.order.turn(self.rank, tick)
        earliest, latest = (tick.step, turn.earliest), (tick.step, turn.latest)
        return ExpectedTick(ticks, tick, owes_reply, earliest, latest)


class ServerMachine(Generic[Peer, Work]):
    """Decides what a server does. Not thread-safe.

    Args:
        server_id: the server's name in plans.
        limit_bytes: most memory for messages; None for no limit.

    Attributes:
        now: seconds on any clock that never goes back; set before a method is called.
    """

    def __init__(self, server_id: str, limit_bytes: int | None = None) -> None:
        self.now = 0.0
        self._server_id = server_id
        self._jobs: dict[str, _Job[Work]] = {}
        self._ranks: dict[Peer, _ServedRank[Work]] = {}
        # Ranks whose connection was reset and that have made no other: when, by job and rank.
        self._lost_ranks: dict[tuple[str, int], float] = {}
        self._pressure: BackPressure[Peer] = BackPressure(limit_bytes)
        self._n_leaving = 0

    @property
    def job_ids(self) -> list[str]:
        """The open jobs."""
        return list(self._jobs)

    @property
    def n_open_ticks(self) -> int:
        """Ticks of which some rows have arrived."""
        return sum(len(step.open) for job in self._jobs.values() for step in job.steps.values())

    @property
    def has_ranks(self) -> bool:
        """Returns whether a rank is connected."""
        return bool(self._ranks)

    @property
    def idle(self) -> bool:
        """Returns whether no planned step is unfinished and every reply has left."""
        return not self._n_leaving and not any(job.steps for job in self._jobs.values())

    def is_serving(self, last_step: int, first_step: int = 0) -> bool:
        """Returns whether a step from ``first_step`` to ``last_step`` is unfinished, or a reply has
        not left yet."""
        return self._n_leaving > 0 or any(
            first_step <= number <= last_step for _, number in self._live_steps()
        )

    @property
    def lost_ranks(self) -> list[tuple[str, int]]:
        """Jobs and ranks whose connection was reset of late, and that have made no other."""
        return [key for key, at in self._lost_ranks.items() if at > self.now - LOST_RANK_SECONDS]

    # Jobs and plans.

    def open_job(
        self,
        job_id: str,
        n_nano_batches: int,
        order: TickOrder | None = None,
        head_groups: int = 1,
    ) -> None:
        """Takes in a job that the control plane has announced. Idempotent.

        Args:
            job_id: the job.
            n_nano_batches: of each step.
            order: in which its ranks come to their ticks, if they form pipelines.
            head_groups: ticks of a call.
        """
        self._jobs.setdefault(job_id, _Job(job_id, n_nano_batches, order, head_groups))

    def close_job(self, job_id: str, reason: str) -> Instructions[Peer, Work]:
        """Forgets a job. Idempotent."""
        job = self._jobs.pop(job_id, None)
        if job is None:
            return []
        for key in [key for key in self._lost_ranks if key[0] == job_id]:
            del self._lost_ranks[key]
        why = f"job {job_id} was closed: {reason or 'finished'}"
        steps, job.steps = list(job.steps.values()), {}
        return [
            LogLine(why),
            *self._cut(self._ranks_of(job), why),
            *(each for ticks in steps for each in _give_up(ticks, why)),
            *self._pressure.changed(),
        ]

    def recover(self, job_id: str, epoch: int) -> Instructions[Peer, Work]:
        """Drops the steps and connections of a job whose epoch is below ``epoch``, and takes in no
        more of them. Idempotent."""
        job = self._jobs.get(job_id)
        return self._recover(job, epoch) if job is not None else []

    def _recover(self, job: _Job[Work], epoch: int) -> Instructions[Peer, Work]:
        if epoch <= job.epoch:
            return []
        job.epoch = epoch
        job.refused = {key: why for key, why in job.refused.items() if key[0] >= epoch}
        why = f"job {job.job_id} recovers with epoch {epoch}"
        void = [number for number, ticks in job.steps.items() if ticks.outline.epoch < epoch]
        dropped = [each for number in void for each in _give_up(job.steps.pop(number), why)]
        cut = self._cut([p for p in self._ranks_of(job) if self._ranks[p].epoch < epoch], why)
        return [
            LogLine(f"{why}: {len(void)} steps and {len(cut)} connections dropped"),
            *cut,
            *dropped,
            *self._pressure.changed(),
        ]

    def wants_plan(self, job_id: str, step: int, epoch: int) -> bool:
        """Decides whether the outline of a plan that has come is to be derived."""
        job = self._jobs[job_id]
        before = job.steps.get(step)
        oldest = max(job.epoch, before.outline.epoch if before is not None else 0)
        return epoch >= oldest and job.is_new(step, epoch)

    def step_planned(
        self, job_id: str, step: Work, outline: StepOutline
    ) -> Instructions[Peer, Work]:
        """Takes in the outline of a plan that was wanted."""
        job, ticks = self._jobs.get(job_id), ServedTicks(step, outline)
        # The job may have been closed, or have recovered, while the outline was derived.
        if job is None or outline.epoch < job.epoch:
            return []
        # Of a recovery that this server has not heard of, perhaps nor of the plan before: rows that
        # ranks sent by that one have the same tags, so all connect again, as after any recovery.
        out = self._recover(job, outline.epoch)
        if ticks.finished:
            return out
        try:
            self._pressure.add_step(job_id, _needs(job, outline), self._live_steps())
        except MemoryTooSmall as error:
            return out + self._refuse_step(job, outline, error)
        job.steps[outline.step] = ticks
        out.append(ReserveMemory(step))
        for peer in self._ranks_of(job):
            self._ranks[peer].extend(ticks)
            out += self._post(peer)
        return out

    def _refuse_step(
        self, job: _Job[Work], outline: StepOutline, error: MemoryTooSmall
    ) -> Instructions[Peer, Work]:
        why = f"step {outline.step} cannot be served by {self._server_id}: {error}"
        job.refused[outline.epoch, outline.step] = why
        concerned = [p for p in self._ranks_of(job) if outline.has_rank(self._ranks[p].rank)]
        return [LogLine(why, "error"), *(CloseConnection(peer, why) for peer in concerned)]

    def abandon(self, job_id: str, rank: int, first_step: int) -> Instructions[Peer, Work]:
        """Forgets the unfinished steps before ``first_step`` that ``rank`` takes part in: it does
        not run them to the end."""
        job = self._jobs.get(job_id)
        if job is None:
            return []
        why = f"rank {rank} did not run the step to its end, it went on with step {first_step}"
        void = [
            number
            for number, ticks in job.steps.items()
            if number < first_step and ticks.outline.has_rank(rank)
        ]
        return [each for number in void for each in _give_up(job.steps.pop(number), why)]

    # Connections.

    def connect(
        self, job_id: str, peer: Peer, rank: int, first_step: int, epoch: int
    ) -> Instructions[Peer, Work] | RankRefusal:
        """Takes in a rank that has proven itself and asks to be served from ``first_step`` on."""
        job = self._jobs.get(job_id)
        if job is None:
            return RankRefusal("unknown-job", f"unknown job {job_id!r}")
        refused = [
            why
            for (of_epoch, step), why in job.refused.items()
            if of_epoch >= epoch and step >= first_step
        ]
        if refused:
            return RankRefusal("memory", refused[0])
        if epoch < job.epoch:
            return RankRefusal(
                "epoch",
                f"epoch {epoch} of job {job_id!r} is over; it recovered with epoch {job.epoch}",
            )
        # A rank may hear of a recovery before this server does.
        out = self._recover(job, epoch)
        lanes: list[RankLane[Work]] = [RankLane(job.head_groups) for _ in range(job.n_nano_batches)]
        connected = self._ranks[peer] = _ServedRank(job, rank, first_step, epoch, lanes)
        self._lost_ranks.pop((job_id, rank), None)
        out += self.abandon(job_id, rank, first_step)
        for number in sorted(job.steps):
            connected.extend(job.steps[number])
        return out + self._post(peer)

    def disconnect(self, peer: Peer, *, was_reset: bool) -> Instructions[Peer, Work]:
        """Forgets a connection that has ended; none if it did not count.

        Args:
            peer: the connection.
            was_reset: by the operating system of a peer that is no more.
        """
        gone = self._ranks.pop(peer, None)
        if gone is None:
            return []
        is_lost = was_reset and not any(
            other.job is gone.job and other.rank == gone.rank for other in self._ranks.values()
        )
        if is_lost:
            self._lost_ranks[gone.job.job_id, gone.rank] = self.now
        return [*self._pressure.changed(), ReportGone(peer, is_lost)]

    def _ranks_of(self, job: _Job[Work]) -> list[Peer]:
        return [peer for peer, rank in self._ranks.items() if rank.job is job]

    def _cut(self, peers: Iterable[Peer], why: str) -> list[CloseConnection[Peer]]:
        cut = list(peers)
        for peer in cut:
            del self._ranks[peer]
        return [CloseConnection(peer, why) for peer in cut]

    # Ticks.

    def rows_arrived(self, job_id: str, peer: Peer, step: Work, tick: Tick) -> Answer[Work]:
        """Answers the request of a posted receive."""
        ticks = self._live(job_id, tick.step, step)
        if ticks is not None:
            return _take(ticks, tick)
        rank = self._ranks.get(peer)
        lane = rank.lanes[tick.nano_batch] if rank is not None else None
        entry = lane.under_way.get(tick) if lane is not None else None
        given_up = entry.ticks.given_up if entry is not None else ""
        return given_up or f"{tick}: the step is over on this server"

    def local_rows(self, job_id: str, epoch: int, tick: Tick) -> Answer[Work]:
        """Answers the rank in the server's own process, which hands in its side of a tick."""
        ticks = self._live(job_id, tick.step)
        if ticks is None or ticks.outline.epoch != epoch:
            return (
                f"{tick}: the step is over on this process's own server, or another rank has "
                "given it up"
            )
        return _take(ticks, tick)

    def reply_begun(self) -> None:
        """Counts a reply that is on its way."""
        self._n_leaving += 1

    def reply_ended(self) -> None:
        """Counts a reply that has left, or could not."""
        self._n_leaving -= 1

    def answered(self, peer: Peer, tick: Tick) -> Instructions[Peer, Work]:
        """Goes on with a rank that is owed nothing more of a tick: it may send the one behind."""
        rank = self._ranks.get(peer)
        if rank is None:
            return []
        entry = rank.lanes[tick.nano_batch].under_way.pop(tick, None)
        if entry is not None:
            rank.over(entry)
        return self._memory_over(rank, tick) + self._post(peer)

    def _memory_over(self, rank: _ServedRank[Work], tick: Tick) -> Instructions[Peer, Work]:
        """Frees a rank's memory of a tick in pipelines, where other ranks come to the tick
        much later."""
        job = rank.job
        if job.order is None:
            return []
        self._pressure.tick_over(job.job_id, tick, job.memory_lane(rank.rank, tick))
        return [*self._pressure.changed()]

    def lane_skipped(
        self, job_id: str, peer: Peer, rank: int, step: Work, tick: Tick
    ) -> Instructions[Peer, Work]:
        """Ends the lane of a posted receive that the rank, which may have left since, has skipped:
        it sends nothing more of it in the step."""
        connected = self._ranks.get(peer)
        over: Instructions[Peer, Work] = []
        if connected is not None:
            for entry in connected.lanes[tick.nano_batch].end(step):
                connected.over(entry)
                over += self._memory_over(connected, entry.tick)
        ticks = self._live(job_id, tick.step, step)
        if ticks is not None:
            over += self._end_lane(job_id, ticks, rank, tick)
        return over + self._post(peer)

    def local_lane_ended(
        self, job_id: str, epoch: int, rank: int, first: Tick
    ) -> Instructions[Peer, Work]:
        """Does as :meth:`lane_skipped` for the rank in the server's own process."""
        ticks = self._live(job_id, first.step)
        if ticks is None or ticks.outline.epoch != epoch:
            return []
        return self._end_lane(job_id, ticks, rank, first)

    def _end_lane(
        self, job_id: str, ticks: ServedTicks[Work], rank: int, first: Tick
    ) -> Instructions[Peer, Work]:
        over, left, stuck = ticks.end_lane(rank, first)
        for tick in over:
            self._forget_memory(job_id, ticks, tick)
        return [
            *(self._pressure.changed() if over else []),
            *(LeaveTick(ticks.step, tick, rank) for tick in left),
            *(GiveUpTick(ticks.step, tick, why) for tick, why in stuck),
            *self._if_finished(job_id, ticks),
        ]

    def tick_over(
        self, job_id: str, step: Work, tick: Tick, failure: str
    ) -> Instructions[Peer, Work]:
        """Ends a tick whose ranks all have their replies, or that was given up.

        One that failed fails the whole step: the ranks that it owed a reply cannot go on, and those
        that are still to send must learn of it.

        Args:
            job_id, step, tick: which.
            failure: why it failed; empty if it did not.
        """
        ticks = self._live(job_id, tick.step, step)
        if ticks is None:
            # The step's memory went with it; that of the tick's number may be a later plan's.
            return [*self._pressure.changed()]
        ticks.tick_over(tick)
        self._forget_memory(job_id, ticks, tick)
        out: Instructions[Peer, Work] = [*self._pressure.changed()]
        if failure:
            del self._jobs[job_id].steps[tick.step]
            return out + _give_up(ticks, f"{tick} failed: {failure}")
        return out + self._if_finished(job_id, ticks)

    def _forget_memory(self, job_id: str, ticks: ServedTicks[Work], tick: Tick) -> None:
        """The tick needs none any more, of any rank."""
        outline = ticks.outline.lanes[tick.nano_batch][tick]
        job = self._jobs[job_id]
        for lane in {job.memory_lane(rank, tick) for rank in outline.message_bytes}:
            self._pressure.tick_over(job_id, tick, lane)

    def _if_finished(self, job_id: str, ticks: ServedTicks[Work]) -> Instructions[Peer, Work]:
        if not ticks.finished:
            return []
        del self._jobs[job_id].steps[ticks.outline.step]
        return [ReportStep(ticks.step)]

    def _live(self, job_id: str, number: int, step: Work | None = None) -> ServedTicks[Work] | None:
        """A planned and unfinished step, if it is ``step``."""
        job = self._jobs.get(job_id)
        ticks = job.steps.get(number) if job is not None else None
        return ticks if ticks is None or step is None or ticks.step == step else None

    def _live_steps(self) -> list[tuple[str, int]]:
        return [(job.job_id, number) for job in self._jobs.values() for number in job.steps]

    # Receives.

    def _post(self, peer: Peer) -> Instructions[Peer, Work]:
        """The receives of all ticks that may come now."""
        rank = self._ranks.get(peer)
        if rank is None:
            return []
        out: Instructions[Peer, Work] = []
        last = rank.turns.now
        for lane in rank.lanes:
            while (entry := lane.next_to_post(last)) is not None:
                memory_lane = rank.job.memory_lane(rank.rank, entry.tick)
                if not self._pressure.admit(rank.job.job_id, entry.tick, memory_lane):
                    out += self.no_room(peer, entry.tick)
                    break
                out.append(PostReceive(peer, entry.ticks.step, entry.tick))
        return out

    def no_room(self, peer: Peer, tick: Tick) -> Instructions[Peer, Work]:
        """Puts off the receive of ``tick`` until there is memory for it."""
        rank = self._ranks.get(peer)
        if rank is None:
            return []
        lane = rank.lanes[tick.nano_batch]
        lane.put_back(tick)
        return [*self._pressure.wait(peer, idle=not lane.under_way, now=self.now)]

    def memory_freed(self) -> Instructions[Peer, Work]:
        """Gives those who wait another chance: memory of messages has come back."""
        return [*self._pressure.changed()]

    def retry(self) -> Instructions[Peer, Work]:
        """Posts what waits for memory, soon after ``RetrySoon``."""
        peers, reports = self._pressure.retry(self._live_steps(), self.now)
        return [*(each for peer in peers for each in self._post(peer)), *reports]


def _take(ticks: ServedTicks[Work], tick: Tick) -> Answer[Work]:
    taken = ticks.open_tick(tick)
    return taken if isinstance(taken, str) else (ticks.step, taken)


def _give_up(ticks: ServedTicks[Work], why: str) -> list[GiveUpTick[Work]]:
    return [GiveUpTick(ticks.step, tick, why) for tick in ticks.give_up(why)]


def _needs(job: _Job[Work], outline: StepOutline) -> dict[MemoryLane, list[tuple[Tick, int]]]:
    """The ticks of each lane of the memory in order, each with the memory of its messages."""
    order, needs = job.order, dict[MemoryLane, list[tuple[Tick, int]]]()
    for nano_batch, ticks in outline.lanes.items():
        for tick, each in ticks.items():
            if order is None:
                needs.setdefault(nano_batch, []).append((tick, sum(each.message_bytes.values())))
                continue
            for rank, n_bytes in each.message_bytes.items():
                needs.setdefault((rank, order.row(tick)), []).append((tick, n_bytes))
    if order is not None:
        for lane, of_lane in needs.items():
            assert isinstance(lane, tuple)
            of_lane.sort(key=lambda need, rank=lane[0]: order.turn(rank, need[0]).latest)  # type: ignore[misc]
    return needs
