"""Servers of a model: the machine that runs in production, driven without a network.

The shell here carries instructions out as the real one does: what goes to the executor waits in a
queue.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from attention_node.machine import instructions
from attention_node.machine.outline import StepOutline
from attention_node.machine.server import Answer, Instructions, RankRefusal, ServerMachine
from attention_node.machine.tick import TickMachine
from core_attention.tick import Tick
from core_attention.tick_order import TickOrder

JOB = "job"

Peer = tuple[int, int]
"""A connection: rank and epoch."""


class GiveUp(NamedTuple):
    """An open tick that the executor is to end."""

    step: Hashable
    tick: TickMachine


class Leave(NamedTuple):
    """An open tick with which the executor is to go on without a rank."""

    step: Hashable
    tick: TickMachine
    rank: int


class Soon(NamedTuple):
    """A method of the machine that the executor is to call."""

    method: str
    arguments: tuple[Any, ...] = ()


class Gone(NamedTuple):
    """A connection that has ended."""

    peer: Peer
    was_reset: bool


class Part(NamedTuple):
    """A part of an open tick that may run."""

    step: Hashable
    tick: TickMachine
    number: int


class Reply(NamedTuple):
    """What a server has sent: to whom, of which tick of which step, and over which connection; None
    for the rank in its process."""

    rank: int
    step: Hashable
    tick: Tick
    peer: Peer | None


class ModelServer:
    """A server's machine and what its shell holds.

    Args:
        n_lanes: of the job.
        limit_bytes: most memory for messages; None for no limit.
        order: in which ranks come to their ticks, if they form pipelines.
        head_groups: ticks of a call.

    Attributes:
        connected: the connections that are open.
        posted: receives on offer, by connection and tick, each with its step's handle.
        ready: parts that may run.
        soon: what the executor is to do between parts, in this order.
        gone: connections that have ended, of which the machine is still to hear.
        replies: those sent since they were last taken.
        sources: by open tick, its step and the connection of each of its sources.
    """

    def __init__(
        self,
        n_lanes: int,
        limit_bytes: int | None = None,
        order: TickOrder | None = None,
        head_groups: int = 1,
    ) -> None:
        self.machine: ServerMachine[Peer, Hashable] = ServerMachine("server", limit_bytes)
        self.connected: set[Peer] = set()
        self.posted: dict[tuple[Peer, Tick], Hashable] = {}
        self.ready: list[Part] = []
        self.soon: list[Soon | GiveUp | Leave] = []
        self.gone: set[Gone] = set()
        self.replies: list[Reply] = []
        self.sources: dict[TickMachine, tuple[Hashable, dict[int, Peer | None]]] = {}
        self.machine.open_job(JOB, n_lanes, order, head_groups)

    def carry_out(self, due: Instructions[Peer, Hashable]) -> None:
        """Does what the machine says."""
        for each in due:
            match each:
                case instructions.PostReceive(peer, step, tick):
                    if peer in self.connected:
                        self.posted[peer, tick] = step
                case instructions.CloseConnection(peer):
                    self.close(peer)
                case instructions.GiveUpTick(step, tick):
                    self.soon.append(GiveUp(step, tick))
                case instructions.LeaveTick(step, tick, rank):
                    self.soon.append(Leave(step, tick, rank))
                case instructions.RetrySoon():
                    self.soon.append(Soon("retry"))

    def connect(self, peer: Peer, first_step: int) -> bool:
        """Whether the rank is welcome; it is connected then."""
        rank, epoch = peer
        self.connected.add(peer)
        due = self.machine.connect(JOB, peer, rank, first_step, epoch)
        if isinstance(due, RankRefusal):
            self.connected.discard(peer)
            return False
        self.carry_out(due)
        return True

    def close(self, peer: Peer) -> None:
        """The server ends a connection."""
        self._forget(peer)
        self.carry_out(self.machine.disconnect(peer, was_reset=False))

    def lose(self, peer: Peer, *, was_reset: bool) -> None:
        """A connection ends, of which the machine is still to hear."""
        self._forget(peer)
        self.gone.add(Gone(peer, was_reset))

    def hear_of_loss(self, gone: Gone) -> None:
        """The machine hears of a connection that has ended."""
        self.gone.discard(gone)
        self.carry_out(self.machine.disconnect(gone.peer, was_reset=gone.was_reset))

    def recover(self, epoch: int) -> None:
        """The control plane begins a recovery."""
        self.carry_out(self.machine.recover(JOB, epoch))

    def plan(self, handle: Hashable, outline: StepOutline) -> None:
        """A plan comes, perhaps again."""
        if JOB in self.machine.job_ids and self.machine.wants_plan(
            JOB, outline.step, outline.epoch
        ):
            self.carry_out(self.machine.step_planned(JOB, handle, outline))

    def end_job(self) -> None:
        """The control plane closes the job."""
        self.carry_out(self.machine.close_job(JOB, "finished"))

    def rows_arrive(self, peer: Peer, tick: Tick) -> bool:
        """Rows come over a connection; False where no receive is on offer for them."""
        step = self.posted.pop((peer, tick), None)
        if step is None:
            return False
        answer = self.machine.rows_arrived(JOB, peer, step, tick)
        if isinstance(answer, str):
            self.close(peer)
        else:
            self._take(*answer, peer[0], peer)
        return True

    def skip(self, peer: Peer, tick: Tick) -> None:
        """A rank sends nothing of a tick's lane any more."""
        step = self.posted.pop((peer, tick))
        self.soon.append(Soon("lane_skipped", (JOB, peer, peer[0], step, tick)))

    def local_rows_arrive(self, rank: int, epoch: int, tick: Tick) -> bool:
        """Rows of the rank in the server's process; False where they are refused."""
        answer: Answer[Hashable] = self.machine.local_rows(JOB, epoch, tick)
        if isinstance(answer, str) or rank in answer[1].arrived:
            return False
        self._take(*answer, rank, None)
        return True

    def end_local_lane(self, rank: int, epoch: int, first: Tick) -> None:
        """The rank in the server's process sends nothing of a lane any more."""
        self.carry_out(self.machine.local_lane_ended(JOB, epoch, rank, first))

    def run_part(self) -> None:
        """The kernel has run the oldest ready part."""
        step, tick, number = self.ready.pop(0)
        self._reply(step, tick, tick.part_done(number))

    def run_soon(self) -> None:
        """The executor comes to what is next in its queue."""
        item = self.soon.pop(0)
        if isinstance(item, GiveUp):
            self._give_up(item.step, item.tick)
        elif isinstance(item, Leave):
            if not item.tick.closed:
                item.tick.leave({item.rank})
                self._reply(item.step, item.tick, item.tick.last_replies())
        else:
            self.carry_out(getattr(self.machine, item.method)(*item.arguments))

    def settle(self) -> None:
        """The executor does all that it can do."""
        while self.ready or self.soon:
            if self.soon:
                self.run_soon()
            else:
                self.run_part()

    def _forget(self, peer: Peer) -> None:
        self.connected.discard(peer)
        self.posted = {key: step for key, step in self.posted.items() if key[0] != peer}

    def _take(self, step: Hashable, tick: TickMachine, rank: int, peer: Peer | None) -> None:
        if tick.closed or rank in tick.arrived:
            if peer is not None:
                self.close(peer)
            return
        self.sources.setdefault(tick, (step, {}))[1][rank] = peer
        self.ready += [Part(step, tick, number) for number in tick.arrive(rank)]
        self._reply(step, tick, tick.last_replies())

    def _reply(self, step: Hashable, tick: TickMachine, ranks: list[int]) -> None:
        for rank in ranks:
            peer = self.sources[tick][1][rank]
            tick.replied(rank)
            self.replies.append(Reply(rank, step, tick.tick, peer))
            if peer is not None:
                self.soon.append(Soon("answered", (peer, tick.tick)))
        if tick.is_complete:
            self._end(step, tick)

    def _give_up(self, step: Hashable, tick: TickMachine) -> None:
        if tick.closed:
            return
        for rank in tick.give_up(RuntimeError("given up")):
            peer = self.sources[tick][1][rank]
            if peer is not None:
                self.close(peer)
        self._end(step, tick)

    def _end(self, step: Hashable, tick: TickMachine) -> None:
        tick.close()
        self.sources.pop(tick, None)
        self.ready = [part for part in self.ready if part.tick is not tick]
        failure = "" if tick.failure is None else str(tick.failure)
        self.carry_out(self.machine.tick_over(JOB, step, tick.tick, failure))
