"""A model of recovery: ranks, servers, a control plane, and everything that can happen to them.

Servers and ranks are the machines that run in production (:mod:`tests.service.model.server`,
:mod:`tests.service.model.rank`); the control plane is written down here a second time.

What it leaves out is what does not matter to the question "can a tick go wrong": bytes, time, the
data itself. What it keeps: what each process knows and when it learns of it, events that travel in
streams, connections that lose what is in flight, every order in which these can happen.

Places where a step of the model stands for several of the real system:

- A rank begins the ticks that it can at once; their rows then reach each server at any later time,
  or never.
- A server answers as soon as the rows that an answer needs are there. The answer travels.
- The control plane plans at once when the last answer is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

from attention_node.machine.outline import StepOutline, TickOutline
from tests.service.model.core import Core, Cores
from tests.service.model.explorer import ModelViolation, Move
from tests.service.model.rank import (
    Answer,
    Close,
    Done,
    Finished,
    Lost,
    ModelRank,
    PlanOwn,
    Recover,
    RecoverOwn,
    Rows,
    take_done,
)
from tests.service.model.server import ModelServer
from tests.service.model.setting import Document, Plan, Setting

Event = Plan | Recover | Finished
Item = TypeVar("Item")


class Request(NamedTuple):
    """Rows of a rank that a server holds."""

    rank: int
    lane: int
    tick: int
    epoch: int


class Reply(NamedTuple):
    """An answer on its way: the pieces whose results are in it, and the epochs of its sources."""

    rank: int
    server: int
    lane: int
    tick: int
    pieces: tuple[tuple[int, int], ...]
    epochs: frozenset[int]


class Rank(NamedTuple):
    """``stream`` is what it is still to read from the control plane."""

    core: Core[ModelRank]
    joined: bool
    stream: tuple[Event, ...]


class Server(NamedTuple):
    """A pool server, or a rank's own, whose stream is its rank's. ``plan`` is the last one that it
    has read; ``requests`` came since."""

    alive: bool
    member: bool
    core: Core[ModelServer]
    plan: Plan | None
    requests: frozenset[Request]
    stream: tuple[Event, ...]


class ControlPlane(NamedTuple):
    """``answers`` is None unless a recovery is under way; an answer counts a rank's complete ticks,
    by step and lane."""

    alive: bool
    epoch: int
    answers: tuple[tuple[tuple[int, ...], ...] | None, ...] | None
    reported_steps: tuple[int, ...]
    finished_steps: int


class Faults(NamedTuple):
    """Those that may still happen."""

    crashes: int
    cuts: int
    restarts: int


class State(NamedTuple):
    ranks: tuple[Rank, ...]
    servers: tuple[Server, ...]
    replies: frozenset[Reply]
    control: ControlPlane
    faults: Faults


Moves = Iterator[Move[State]]


class Model:
    """All that can happen in a setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.rules = setting.rules
        self.documents_of_lane = [
            [(i, d) for i, d in enumerate(setting.documents) if d.lane == lane]
            for lane in range(setting.n_lanes)
        ]
        # Asked for again in every state, of few different plans.
        self.exchanges = lru_cache(maxsize=None)(self._exchanges)
        self.sources = lru_cache(maxsize=None)(self._sources)
        # What a rank or a server does is worked out once for each of its states.
        self.went_on = lru_cache(maxsize=None)(self._went_on)
        self.recovered = lru_cache(maxsize=None)(self._recovered)
        self.planned = lru_cache(maxsize=None)(self._planned)
        self.delivered = lru_cache(maxsize=None)(self._delivered)
        self.ranks: Cores[ModelRank] = Cores(setting, *setting.ticks.values())
        self.servers: Cores[ModelServer] = Cores(*setting.ticks.values())
        self.new_server = self.servers.core(
            ModelServer(setting.n_lanes, head_groups=setting.head_groups)
        )

    def first_state(self) -> State:
        """Everybody knows the plans of all steps and nothing has been sent."""
        setting = self.setting
        documents = len(setting.documents)
        plan = Plan(
            epoch=1,
            servers=self._assign(list(range(setting.n_servers)), 1),
            first_tick=((0,) * documents,) * setting.n_steps,
            finished_steps=0,
        )
        servers = range(setting.n_servers + setting.n_ranks)
        cores = [self.planned(self.new_server, s, plan) for s in servers]
        return State(
            ranks=tuple(self._beginning(r, plan) for r in range(setting.n_ranks)),
            servers=tuple(Server(True, True, core, plan, frozenset(), ()) for core in cores),
            replies=frozenset(),
            control=ControlPlane(True, 1, None, (0,) * setting.n_ranks, 0),
            faults=Faults(setting.crashes, setting.cuts, setting.restarts),
        )

    def _beginning(self, r: int, plan: Plan) -> Rank:
        rank = ModelRank(self.setting, r)
        rank.reads_plan(plan)
        rank.begins(frozenset())
        take_done(rank)
        return Rank(self.ranks.core(rank), True, ())

    def is_finished(self, state: State) -> bool:
        last = self.setting.last_place
        return all(rank.core.value.place == last for rank in state.ranks)

    def moves(self, state: State) -> Moves:
        """Everything that can happen next.

        Raises:
            ModelViolation: a rank takes a wrong result, or has to send rows that are gone.
        """
        if self._is_settled(state):
            yield from self._first_move(state)
            return
        for rank in range(self.setting.n_ranks):
            yield from self._rank_moves(state, rank)
        for server in range(self.setting.n_servers):
            yield from self._server_moves(state, server)
        yield from self._control_plane_moves(state)

    def _is_settled(self, state: State) -> bool:
        """Whether no fault can happen any more and every event has been read: then all that is
        left are rows, replies and reports, whose order does not matter, so one order will do."""
        return (
            not any(state.faults)
            and state.control.alive
            and state.control.answers is None
            and not any(self._is_unsettled(rank) for rank in state.ranks)
            and not any(server.stream for server in state.servers)
            and all(server.alive or not server.member for server in state.servers)
        )

    def _is_unsettled(self, rank: Rank) -> bool:
        return bool(
            rank.stream
            or not rank.joined
            or rank.core.value.connecting
            or rank.core.value.examining
            or rank.core.value.lost
        )

    def _first_move(self, state: State) -> Moves:
        for rank in range(self.setting.n_ranks):
            for move in self._rank_moves(state, rank):
                yield move
                return

    # Ranks.

    def _rank_moves(self, state: State, r: int) -> Moves:
        rank, control = state.ranks[r], state.control
        it = rank.core.value
        if rank.stream:
            yield self._rank_reads(state, r)
        if it.connecting:
            gone = self._gone(state, it.connecting[0].plan)
            yield self._goes_on(state, r, "connects", "connects", gone)
        if it.next_step is not None:
            plan = it.plan_of(it.next_step)
            gone = frozenset() if plan is None else self._gone(state, plan)
            yield self._goes_on(state, r, f"begins step {it.next_step}", "begins", gone)
        if it.examining:
            yield self._goes_on(state, r, "has examined replies", "examined")
        if it.place < self.setting.last_place:
            yield from self._collects(state, r)
        yield from self._rows_travel(state, r)
        yield from self._misses(state, r)
        if not control.alive:
            return
        if not rank.joined:
            yield Move(f"rank {r} comes back to the control plane", self._joins(state, r))
            return
        for lost in sorted(it.lost):
            yield Move(
                f"rank {r} reports the loss of server {lost.server} in epoch {lost.epoch}",
                self._reports_lost(state, r, lost),
            )
        steps_done = self._steps_done(it)
        if control.reported_steps[r] < steps_done:
            yield Move(f"rank {r} reports its step", self._reports(state, r, steps_done))

    def _rank_reads(self, state: State, r: int) -> Move[State]:
        rank = state.ranks[r]
        event, rest = rank.stream[0], rank.stream[1:]
        state = self._with_rank(state, r, rank._replace(stream=rest))
        return self._goes_on(state, r, f"reads {_name(event)}", "reads", event)

    def _goes_on(self, state: State, r: int, name: str, how: str, *what: Hashable) -> Move[State]:
        """Something happens to a rank, by which it does something to others."""
        state = self._after(state, r, how, *what)
        if not self.setting.threads:
            state = self._without_threads(state, r)
        return Move(f"rank {r} {name}", self._plan_if_answered(state))

    def _after(self, state: State, r: int, how: str, *what: Hashable) -> State:
        rank = state.ranks[r]
        core, done = self.went_on(rank.core, how, *what)
        state = self._with_rank(state, r, rank._replace(core=core))
        for each in done:
            state = self._does(state, r, each)
        return state

    def _without_threads(self, state: State, r: int) -> State:
        """What a rank's threads have to do is done at once."""
        while connecting := state.ranks[r].core.value.connecting:
            state = self._after(state, r, "connects", self._gone(state, connecting[0].plan))
        if state.control.alive and state.ranks[r].joined:
            for lost in sorted(state.ranks[r].core.value.lost):
                state = self._reports_lost(state, r, lost)
        return state

    def _went_on(
        self, core: Core[ModelRank], how: str, *what: Hashable
    ) -> tuple[Core[ModelRank], tuple[Done, ...]]:
        def go_on(rank: ModelRank) -> tuple[Done, ...]:
            getattr(rank, how)(*what)
            return take_done(rank)

        return self.ranks.changed(core, go_on)

    def _does(self, state: State, r: int, done: Done) -> State:
        own, control = state.servers[self._own(r)], state.control
        match done:
            case PlanOwn(plan):
                own = self._server_plans(own, self._own(r), plan)
                return self._with_server(state, self._own(r), own)
            case RecoverOwn(epoch):
                own = self._server_recovers(own, epoch)
                return self._with_server(state, self._own(r), own)
            case Close():
                others = frozenset(reply for reply in state.replies if reply.rank != r)
                return state._replace(replies=others)
            case Answer(epoch, complete):
                if control.alive and control.epoch == epoch and control.answers is not None:
                    control = control._replace(answers=_with(control.answers, r, complete))
                return state._replace(control=control)

    def _gone(self, state: State, plan: Plan) -> frozenset[int]:
        """The pool's servers of a plan that cannot be reached: they are dead, or have started
        again and neither know the plan nor will."""
        return frozenset(
            s
            for s in self._of_pool(plan)
            if not (known := state.servers[s]).alive
            or (known.plan != plan and plan not in known.stream)
        )

    def _collects(self, state: State, r: int) -> Moves:
        it = state.ranks[r].core.value
        lane, tick = self.setting.collects[it.place]
        epoch, plan = it.awaits(lane, tick), it.plan_of(self.setting.step_at(it.place))
        if epoch is None or plan is None:
            return
        owing = [s for s, owes in self.exchanges(plan, r, lane, tick) if owes]
        here = {
            reply.server: reply
            for reply in sorted(state.replies)
            if (reply.rank, reply.lane, reply.tick) == (r, lane, tick)
        }
        if not all(server in here for server in owing):
            return
        self._check_taken(r, lane, tick, epoch, [here[server] for server in owing])
        gone = {
            reply
            for reply in state.replies
            if (reply.rank, reply.lane, reply.tick) == (r, lane, tick)
        }
        yield self._goes_on(
            state._replace(replies=state.replies - gone),
            r,
            f"has all replies of lane {lane} tick {tick} in epoch {epoch}",
            "replies_here",
            lane,
            tick,
            epoch,
        )

    def _check_taken(self, r: int, lane: int, tick: int, epoch: int, taken: list[Reply]) -> None:
        where = f"rank {r}, lane {lane}, tick {tick}, epoch {epoch}"
        epochs = {e for reply in taken for e in reply.epochs}
        if epochs - {epoch}:
            raise ModelViolation(f"{where}: complete with results of epochs {sorted(epochs)}")
        pieces = sorted(piece for reply in taken for piece in reply.pieces)
        wanted = sorted(
            (number, piece)
            for number, document in self.documents_of_lane[lane]
            if r in document.ranks
            for piece in self._pieces_for(document, r, tick)
        )
        if pieces != wanted:
            raise ModelViolation(f"{where}: complete with pieces {pieces} instead of {wanted}")

    def _pieces_for(self, document: Document, r: int, tick: int) -> range:
        """Of which pieces of a document a rank is owed results: of its own queries, and backward
        also of all later ones, which read its keys."""
        own = document.ranks.index(r)
        return range(own, len(document.ranks) if self.setting.is_backward(tick) else own + 1)

    def _rows_travel(self, state: State, r: int) -> Moves:
        it = state.ranks[r].core.value
        next_rows: dict[tuple[int, int, int], Rows] = {}
        for rows in sorted(it.rows):
            if not self._lane_may_send(it, rows.lane):
                continue
            for server, _ in self.exchanges(rows.plan, r, rows.lane, rows.tick):
                request = Request(r, rows.lane, rows.tick, rows.plan.epoch)
                if request not in state.servers[server].requests:
                    next_rows.setdefault((server, rows.lane, rows.plan.epoch), rows)
        for (server, _, _), rows in next_rows.items():
            yield from self._arrives(state, r, server, rows)

    def _lane_may_send(self, it: ModelRank, lane: int) -> bool:
        """False only where the rule is broken: an earlier lane's replay still waits for a reply."""
        if self.rules.lanes_are_independent:
            return True
        then, now = self.setting.progress[it.replay_place], self.setting.progress[it.place]
        begun_then = then[lane][1]
        sent_now = now[lane][1] > begun_then
        return sent_now or all(now[i][0] >= then[i][1] for i in range(lane))

    def _arrives(self, state: State, r: int, s: int, rows: Rows) -> Moves:
        """Rows reach a server, which takes them if a receive is on offer."""
        it, server = state.ranks[r].core.value, state.servers[s]
        plan, lane, tick = server.plan, rows.lane, rows.tick
        if not server.alive or plan is None or it.first_step is None:
            return
        # A server that does not refuse what is old knows no better than the rank.
        epoch = rows.plan.epoch if self.rules.servers_refuse_old else plan.epoch
        taken = self.delivered(server.core, s, r, epoch, it.first_step, lane, tick)
        if taken is None:
            return
        core, replied = taken
        requests = server.requests | {Request(r, lane, tick, rows.plan.epoch)}
        server = server._replace(core=core, requests=requests)
        replies = set(state.replies)
        for other in replied:
            owes = dict(self.exchanges(plan, other, lane, tick)).get(s, False)
            if owes and not self._is_lost(state, other, tick, lane, plan.epoch):
                replies.add(self._reply(server, other, s, lane, tick))
        yield Move(
            f"rows of rank {r} for lane {lane} tick {tick} reach {self._server_name(s)} in epoch "
            f"{rows.plan.epoch}",
            state._replace(servers=_with(state.servers, s, server), replies=frozenset(replies)),
        )

    def _is_lost(self, state: State, r: int, tick: int, lane: int, epoch: int) -> bool:
        """Whether a reply goes nowhere: its rank has closed the connection, or lets it go."""
        it = state.ranks[r].core.value
        if self.setting.progress[it.place][lane][0] > tick:
            return True
        return not any(
            (rows.lane, rows.tick) == (lane, tick)
            and (rows.plan.epoch == epoch or not self.rules.servers_refuse_old)
            for rows in it.rows
        )

    def _reply(self, server: Server, r: int, s: int, lane: int, tick: int) -> Reply:
        assert server.plan is not None
        step = tick // self.setting.ticks_per_step
        pieces = tuple(
            (number, piece)
            for number, document in self.documents_of_lane[lane]
            if r in document.ranks
            and server.plan.first_tick[step][number] <= tick % self.setting.ticks_per_step
            for piece in self._pieces_for(document, r, tick)
            if server.plan.servers[number][piece] == s
        )
        sources = self.sources(server.plan, r, s, lane, tick)
        read = [
            q for q in server.requests if (q.lane, q.tick) == (lane, tick) and q.rank in sources
        ]
        if {q.rank for q in read} != sources:
            raise ModelViolation(
                f"{self._server_name(s)} replies to rank {r}, lane {lane}, tick {tick} with rows "
                f"of ranks {sorted(q.rank for q in read)} instead of {sorted(sources)}"
            )
        epochs = {q.epoch for q in read}
        return Reply(r, s, lane, tick, pieces, frozenset(epochs | {server.plan.epoch}))

    def _misses(self, state: State, r: int) -> Moves:
        """A rank loses a pool server of its plan: one that died, or one that lives, by a cut."""
        it, faults = state.ranks[r].core.value, state.faults
        less = state._replace(faults=faults._replace(cuts=max(faults.cuts - 1, 0)))
        if it.connecting and faults.cuts:
            plan = it.connecting[0].plan
            gone = self._gone(state, plan)
            for s in sorted(self._of_pool(plan) - gone):
                name = f"cannot connect to server {s}, by a cut"
                yield replace(self._goes_on(less, r, name, "connects", gone | {s}), fault=True)
        running_plan = it.plan_of(it.step)
        if running_plan is not None:
            yield from self._misses_in(state, less, r, running_plan)

    def _misses_in(self, state: State, less: State, r: int, plan: Plan) -> Moves:
        """The same under the plan of the running step; ``less`` has one cut less to come."""
        it = state.ranks[r].core.value
        gone = self._gone(state, plan)
        for s in sorted(self._of_pool(plan)):
            waited = self._waited(it, r, s, plan)
            if waited is None:
                continue
            if s in gone:
                yield self._goes_on(state, r, f"loses server {s}", "loses", *waited, s)
            elif state.faults.cuts:
                name = f"gives server {s} up, by a cut"
                yield replace(self._goes_on(less, r, name, "loses", *waited, s), fault=True)

    def _waited(self, it: ModelRank, r: int, s: int, plan: Plan) -> tuple[int, int, int] | None:
        """The first tick that a rank has sent to a server and waits for: lane, tick and epoch."""
        for lane, (complete, begun) in enumerate(self.setting.progress[it.place]):
            for tick in range(complete, begun):
                epoch = it.awaits(lane, tick)
                if epoch is not None and s in dict(self.exchanges(plan, r, lane, tick)):
                    return lane, tick, epoch
        return None

    def _reports_lost(self, state: State, r: int, lost: Lost) -> State:
        rank, control = state.ranks[r], state.control
        core, _ = self.went_on(rank.core, "has_reported", lost)
        state = self._with_rank(state, r, rank._replace(core=core))
        is_over = lost.epoch != control.epoch and self.rules.old_reports_change_nothing
        if is_over or not state.servers[lost.server].member:
            return state
        return self._fence(state, lost.server)

    def _joins(self, state: State, r: int) -> State:
        rank = state.ranks[r]._replace(joined=True)
        it = rank.core.value
        epoch = max(state.control.epoch, it.machine.epoch if self.rules.epochs_survive else 0)
        control = state.control._replace(
            epoch=epoch,
            finished_steps=max(state.control.finished_steps, it.finished_steps),
        )
        state = self._with_rank(state, r, rank)._replace(control=control)
        return self._recover(state) if all(rank.joined for rank in state.ranks) else state

    def _reports(self, state: State, r: int, steps: int) -> State:
        control = state.control
        control = control._replace(reported_steps=_with(control.reported_steps, r, steps))
        finished = min(control.reported_steps)
        if finished > control.finished_steps:
            control = control._replace(finished_steps=finished)
            state = self._report_to_ranks(state, Finished(finished))
        return state._replace(control=control)

    def _steps_done(self, it: ModelRank) -> int:
        return 0 if self.setting.n_steps == 1 else self.setting.step_at(it.place)

    # Pool servers.

    def _server_moves(self, state: State, s: int) -> Moves:
        server, faults = state.servers[s], state.faults
        if server.alive and server.stream:
            event, rest = server.stream[0], server.stream[1:]
            server = server._replace(stream=rest)
            match event:
                case Recover(epoch):
                    server = self._server_recovers(server, epoch)
                case Plan():
                    server = self._server_plans(server, s, event)
            yield Move(f"server {s} reads {_name(event)}", self._with_server(state, s, server))
        if server.alive and faults.crashes:
            dead = Server(False, server.member, self.new_server, None, frozenset(), ())
            after = self._with_server(state, s, dead)
            after = after._replace(faults=faults._replace(crashes=faults.crashes - 1))
            yield Move(f"server {s} dies", after, fault=True)
        if not server.alive and not server.member and any(faults):
            again = Server(True, False, self.new_server, None, frozenset(), ())
            yield Move(f"server {s} starts again", self._with_server(state, s, again), fault=True)
        if server.alive and not server.member and state.control.alive and self._may_replan(state):
            member = server._replace(member=True, stream=())
            yield Move(f"server {s} registers", self._with_server(state, s, member))
        if not server.alive and server.member and state.control.alive:
            yield Move(f"the lease of server {s} runs out", self._fence(state, s))

    def _server_recovers(self, server: Server, epoch: int) -> Server:
        core = self.recovered(server.core, epoch)
        if core == server.core:
            return server
        return server._replace(core=core, plan=None, requests=frozenset())

    def _server_plans(self, server: Server, s: int, plan: Plan) -> Server:
        core = self.planned(server.core, s, plan)
        if core == server.core:
            return server
        return server._replace(core=core, plan=plan, requests=frozenset())

    def _recovered(self, core: Core[ModelServer], epoch: int) -> Core[ModelServer]:
        def recover(server: ModelServer) -> None:
            server.recover(epoch)
            server.settle()

        return self.servers.changed(core, recover)[0]

    def _planned(self, core: Core[ModelServer], s: int, plan: Plan) -> Core[ModelServer]:
        def add(server: ModelServer) -> None:
            for step in range(self.setting.n_steps):
                server.plan((s, step, plan), self._outline(plan, s, step))
            server.settle()

        return self.servers.changed(core, add)[0]

    def _delivered(
        self,
        core: Core[ModelServer],
        s: int,
        r: int,
        epoch: int,
        first_step: int,
        lane: int,
        tick: int,
    ) -> tuple[Core[ModelServer], tuple[int, ...]] | None:
        """The server after rows of a rank, and the ranks that have their reply by that; None if
        they cannot reach it."""
        which, peer = self.setting.ticks[lane, tick], (r, epoch)

        def deliver(server: ModelServer) -> list[int] | None:
            if s == self._own(r):
                came = server.local_rows_arrive(r, epoch, which)
            elif peer not in server.connected and not server.connect(peer, first_step):
                return None
            else:
                came = server.rows_arrive(peer, which)
            server.settle()
            replies, server.replies = server.replies, []
            return [reply.rank for reply in replies] if came else None

        after, replied = self.servers.changed(core, deliver)
        return None if replied is None else (after, tuple(replied))

    def _may_replan(self, state: State) -> bool:
        """Whether it matters who is a member: only a plan asks."""
        return (
            any(state.faults)
            or state.control.answers is not None
            or not all(rank.joined for rank in state.ranks)
        )

    # The control plane.

    def _control_plane_moves(self, state: State) -> Moves:
        control, faults = state.control, state.faults
        if control.alive and faults.restarts:
            down = ControlPlane(False, control.epoch, None, (0,) * len(state.ranks), 0)
            yield Move(
                "the control plane dies",
                state._replace(
                    ranks=tuple(rank._replace(joined=False, stream=()) for rank in state.ranks),
                    servers=tuple(
                        server._replace(member=server.member and not self._in_pool(s), stream=())
                        for s, server in enumerate(state.servers)
                    ),
                    control=down,
                    faults=faults._replace(restarts=faults.restarts - 1),
                ),
                fault=True,
            )
        if not control.alive:
            epoch = control.epoch if self.rules.epochs_survive else 0
            up = ControlPlane(True, epoch, None, (0,) * len(state.ranks), 0)
            yield Move("a control plane starts", state._replace(control=up))

    def _fence(self, state: State, s: int) -> State:
        fenced = state.servers[s]._replace(member=False, stream=())
        return self._recover(self._with_server(state, s, fenced))

    def _recover(self, state: State) -> State:
        """A recovery begins, with a new epoch; whatever was under way is over."""
        if not all(rank.joined for rank in state.ranks):
            return state
        epoch = state.control.epoch + 1
        self._check_one_recovery_a_fault(state, epoch)
        control = state.control._replace(epoch=epoch, answers=(None,) * len(state.ranks))
        state = self._report_to_ranks(state._replace(control=control), Recover(epoch))
        servers = list(state.servers)
        for s in range(self.setting.n_servers):
            if servers[s].member:
                servers[s] = servers[s]._replace(stream=(*servers[s].stream, Recover(epoch)))
        return state._replace(servers=tuple(servers))

    def _check_one_recovery_a_fault(self, state: State, epoch: int) -> None:
        setting = self.setting
        recoveries = epoch - 1
        faults = setting.crashes + setting.cuts + setting.restarts - sum(state.faults)
        if self.rules.epochs_survive and recoveries > faults:
            raise ModelViolation(f"{faults} faults have led to {recoveries} recoveries")

    def _plan_if_answered(self, state: State) -> State:
        control = state.control
        if control.answers is None:
            return state
        if self.rules.wait_for_all_answers:
            if None in control.answers:
                return state
        elif all(answer is None for answer in control.answers):
            return state
        members = [s for s in range(self.setting.n_servers) if state.servers[s].member]
        servers_of = self._assign(members, control.epoch)
        first_ticks = self._first_ticks(state)
        plan = Plan(control.epoch, servers_of, first_ticks, control.finished_steps)
        servers = list(state.servers)
        for s in members:
            if any(s in pieces for pieces in plan.servers):
                servers[s] = servers[s]._replace(stream=(*servers[s].stream, plan))
        state = state._replace(servers=tuple(servers), control=control._replace(answers=None))
        return self._report_to_ranks(state, plan)

    def _first_ticks(self, state: State) -> tuple[tuple[int, ...], ...]:
        setting, control = self.setting, state.control
        assert control.answers is not None
        none = ((0,) * setting.n_lanes,) * setting.n_steps
        complete = [none if answer is None else answer for answer in control.answers]
        choose = min if self.rules.first_tick_is_least else max
        return tuple(
            tuple(
                setting.ticks_per_step
                if step < control.finished_steps
                else choose(complete[r][step][document.lane] for r in document.ranks)
                for document in setting.documents
            )
            for step in range(setting.n_steps)
        )

    def _assign(self, members: list[int], epoch: int) -> tuple[tuple[int, ...], ...]:
        """Pieces in turns over the servers, each epoch otherwise; at home if there is no server."""
        return tuple(
            tuple(
                members[(number + piece + epoch) % len(members)] if members else self._own(r)
                for piece, r in enumerate(document.ranks)
            )
            for number, document in enumerate(self.setting.documents)
        )

    # What plan and position imply, for ranks and servers alike.

    def _outline(self, plan: Plan, s: int, step: int) -> StepOutline:
        """What a server knows of a step by its plan."""
        first = step * self.setting.ticks_per_step
        lanes = {
            lane: {
                self.setting.ticks[lane, tick]: outline
                for tick in range(first, first + self.setting.ticks_per_step)
                if (outline := self._tick_outline(plan, s, lane, tick)).before_reply
            }
            for lane in range(self.setting.n_lanes)
        }
        made = StepOutline(step, plan.epoch, self.setting.n_layers, lanes)
        self.servers.share(made, *(each for ticks in lanes.values() for each in ticks.values()))
        return made

    def _tick_outline(self, plan: Plan, s: int, lane: int, tick: int) -> TickOutline:
        step, in_step = divmod(tick, self.setting.ticks_per_step)
        parts = [
            (document, piece)
            for number, document in self.documents_of_lane[lane]
            if plan.first_tick[step][number] <= in_step
            for piece in range(len(document.ranks))
            if plan.servers[number][piece] == s
        ]
        owed = {
            rank: owes
            for rank in range(self.setting.n_ranks)
            for server, owes in self.exchanges(plan, rank, lane, tick)
            if server == s
        }
        return TickOutline(
            needs=tuple(frozenset(document.ranks[: piece + 1]) for document, piece in parts),
            before_reply={
                rank: frozenset(
                    number
                    for number, (document, piece) in enumerate(parts)
                    if rank in document.ranks and piece in self._pieces_for(document, rank, tick)
                )
                for rank in owed
            },
            owed=frozenset(rank for rank, owes in owed.items() if owes),
            message_bytes={},
        )

    def _exchanges(self, plan: Plan, r: int, lane: int, tick: int) -> tuple[tuple[int, bool], ...]:
        """The servers that get rows of a rank in a tick, and whether each owes it a reply."""
        step, in_step = divmod(tick, self.setting.ticks_per_step)
        owes: dict[int, bool] = {}
        for number, document in self.documents_of_lane[lane]:
            if r not in document.ranks or in_step < plan.first_tick[step][number]:
                continue
            for piece in range(document.ranks.index(r), len(document.ranks)):
                server = plan.servers[number][piece]
                reply = piece in self._pieces_for(document, r, tick)
                owes[server] = owes.get(server, False) or reply
        return tuple(sorted(owes.items()))

    def _sources(self, plan: Plan, r: int, s: int, lane: int, tick: int) -> frozenset[int]:
        """The ranks whose rows a server needs before it can reply to ``r``."""
        step, in_step = divmod(tick, self.setting.ticks_per_step)
        ranks: set[int] = {r}
        for number, document in self.documents_of_lane[lane]:
            if r not in document.ranks or in_step < plan.first_tick[step][number]:
                continue
            for piece in self._pieces_for(document, r, tick):
                if plan.servers[number][piece] == s:
                    ranks.update(document.ranks[: piece + 1])
        return frozenset(ranks)

    def _report_to_ranks(self, state: State, event: Event) -> State:
        return state._replace(
            ranks=tuple(
                rank._replace(stream=(*rank.stream, event)) if rank.joined else rank
                for rank in state.ranks
            )
        )

    def _with_rank(self, state: State, r: int, rank: Rank) -> State:
        return state._replace(ranks=_with(state.ranks, r, rank))

    def _of_pool(self, plan: Plan) -> frozenset[int]:
        return frozenset(s for pieces in plan.servers for s in pieces if self._in_pool(s))

    def _with_server(self, state: State, s: int, server: Server) -> State:
        return state._replace(servers=_with(state.servers, s, server))

    def _in_pool(self, s: int) -> bool:
        return s < self.setting.n_servers

    def _own(self, r: int) -> int:
        return self.setting.n_servers + r

    def _server_name(self, s: int) -> str:
        if self._in_pool(s):
            return f"server {s}"
        return f"the server of rank {s - self.setting.n_servers}"


def _with(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _name(event: Event) -> str:
    match event:
        case Recover(epoch):
            return f"recover({epoch})"
        case Plan(epoch, _, first_tick, _):
            return f"the plan of epoch {epoch}, first ticks {first_tick}"
        case Finished(steps):
            return f"finished({steps})"
