"""A tick: one exchange of rows for results, for one layer, nano-batch and phase.

    dispatch   a rank sends its rows to every server that needs them; receives are posted
    serve      a server waits for rows, computes its tasks, and replies to each rank
    collect    a rank waits for the replies and adds them up, by number of server

A server keeps nothing between ticks, so any other process can do a tick in its place. At the end of
a tick the control plane decides who is alive. If a server is not, the survivor with the least to
do takes over its whole part: it is sent the same rows, and answers in the dead server's name. The
partial sums, and the order in which home adds them, stay as planned: so gradients are equal to the
bit.
"""

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from examples.nano_distca import kernel, route
from examples.nano_distca.documents import NanoBatch
from examples.nano_distca.plan import Plan
from examples.nano_distca.route import FORWARD, Phase, Rows
from examples.nano_distca.tasks import Shape
from examples.nano_distca.wire import PeerLost, Wire


class Death(NamedTuple):
    """A server's process kills itself in a tick, when it has sent so many replies."""

    server: int
    tick: int
    replies: int = 0


class Event(NamedTuple):
    """Time of a process: kind is linear, tasks, stand-in, or a wait for rows or replies."""

    kind: str
    lane: int
    begin: float
    end: float


@dataclass
class Tick:
    """Of one process. ``hosts``: the process that answers for each server. ``requests`` come in by
    (rank, server), ``replies`` by server; ``messages`` are those replies that have come."""

    number: int
    phase: Phase
    lane: int
    rows: Rows
    hosts: list[int]
    requests: dict[tuple[int, int], Callable[[], torch.Tensor]] = field(default_factory=dict)
    replies: dict[int, Callable[[], torch.Tensor]] = field(default_factory=dict)
    messages: dict[int, torch.Tensor] = field(default_factory=dict)


@dataclass
class Exchange:
    """One process's side of all ticks; processes are numbered as servers, ranks first. ``settle``
    gives the control plane the processes found lost, and returns those that are dead."""

    me: int
    lanes: Sequence[NanoBatch]
    plans: Sequence[Plan]
    shape: Shape
    wire: Wire
    settle: Callable[[set[int]], set[int]]
    death: Death | None
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        each = zip(self.lanes, self.plans, strict=True)
        self._routes = [route.derive_routes(batch, plan) for batch, plan in each]
        self._hosts = list(range(len(self.plans[0].tasks)))
        self._ticks = 0

    @contextmanager
    def timed(self, kind: str, lane: int) -> Iterator[None]:
        """Notes how long the block took."""
        begin = time.monotonic()
        yield
        self.events.append(Event(kind, lane, begin, time.monotonic()))

    def dispatch(self, phase: Phase, lane: int, rows: Rows) -> Tick:
        """Sends this rank's rows; a server that is no rank has none."""
        tick = Tick(self._ticks, phase, lane, rows, [*self._hosts])
        self._ticks += 1
        self._send(tick, range(len(tick.hosts)))
        return tick

    def serve(self, tick: Tick, servers: Collection[int] | None = None) -> None:
        """Computes the tasks of the servers here: all, or those given."""
        (request, reply), batch = tick.phase, self.lanes[tick.lane]
        servers = range(len(tick.hosts)) if servers is None else servers
        compute = kernel.forward if tick.phase is FORWARD else kernel.backward
        for server in (s for s in servers if tick.hosts[s] == self.me):
            to = {r: rows for (r, s), rows in self._routes[tick.lane].items() if s == server}
            given, results = (
                route.empty_rows(names, batch.tokens, self.shape, self.wire.dtype)
                for names in (request, reply)
            )
            for rank, rows in to.items():
                with self.timed("rows", tick.lane):
                    message = tick.requests[rank, server]()
                route.add(message, rows, request, given)
            with self.timed("tasks" if server == self.me else "stand-in", tick.lane):
                for task in self.plans[tick.lane].tasks[server]:
                    compute(task, batch.first[task.document], given, results)
            for sent, (rank, rows) in enumerate(to.items()):
                self._die(tick, sent)
                self.wire.send(route.pack(results, rows, reply), rank, self._tags(tick, server)[1])
            self._die(tick, len(to))

    def collect(self, tick: Tick) -> Rows:
        """The results of this rank's rows, from whichever process has computed them."""
        servers: Collection[int] = range(len(tick.hosts))
        while servers:
            dead = self.settle(self._wait(tick, servers))
            alive = [process for process in range(len(tick.hosts)) if process not in dead]
            idlest = min(alive, key=lambda process: sum(plan.loads[process] for plan in self.plans))
            servers = [server for server, host in enumerate(tick.hosts) if host in dead]
            self._hosts, tick.hosts = (
                [idlest if host in dead else host for host in hosts]
                for hosts in (self._hosts, tick.hosts)
            )
            self._send(tick, servers)
            self.serve(tick, servers)
        tokens, dtype = self.lanes[tick.lane].tokens, self.wire.dtype
        results = route.empty_rows(tick.phase.reply, tokens, self.shape, dtype)
        for server, message in sorted(tick.messages.items()):
            route.add(message, self._routes[tick.lane][self.me, server], tick.phase.reply, results)
        return results

    def _send(self, tick: Tick, servers: Collection[int]) -> None:
        for (rank, server), rows in self._routes[tick.lane].items():
            if server not in servers:
                continue
            host, (there, back) = tick.hosts[server], self._tags(tick, server)
            if host == self.me:
                asked = route.numbers(rows, tick.phase.request, self.shape)
                tick.requests[rank, server] = self.wire.receive(asked, rank, there)
            if rank == self.me:
                given = route.numbers(rows, tick.phase.reply, self.shape)
                tick.replies[server] = self.wire.receive(given, host, back)
                self.wire.send(route.pack(tick.rows, rows, tick.phase.request), host, there)

    def _tags(self, tick: Tick, server: int) -> tuple[int, int]:
        tag = (tick.number * len(tick.hosts) + server) * len(tick.hosts) + tick.hosts[server]
        return 2 * tag, 2 * tag + 1

    def _wait(self, tick: Tick, servers: Collection[int]) -> set[int]:
        """Waits for replies; returns the processes that are lost."""
        lost = set()
        with self.timed("replies", tick.lane):
            for server in tick.replies.keys() & {*servers}:
                try:
                    tick.messages[server] = tick.replies[server]()
                except PeerLost:
                    lost.add(tick.hosts[server])
        return lost

    def _die(self, tick: Tick, replies: int) -> None:
        if self.death == (self.me, tick.number, replies):
            os.kill(os.getpid(), signal.SIGKILL)
