"""A model of recovery: ranks, servers, a control plane, and everything that can happen to them.

What it leaves out is what does not matter to the question "can a tick go wrong": bytes, time, the
data itself. What it keeps: what each process knows and when it learns of it, events that travel in
streams, connections that lose what is in flight, every order in which these can happen.

Places where a step of the model stands for several of the real system:

- A rank notes the inputs of its next ticks at once; a request of it then reaches each server at any
  later time, or never.
- A server answers as soon as the rows that an answer needs are there. The answer travels.
- The control plane plans at once when the last answer is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, TypeVar

from tests.model.explorer import ModelViolation, Move
from tests.model.setting import Document, Setting


class Plan(NamedTuple):
    """By document: the servers of its pieces, one for each of its ranks, and by step its first
    tick. Servers beyond the pool's are the ranks' own."""

    epoch: int
    servers: tuple[tuple[int, ...], ...]
    first_tick: tuple[tuple[int, ...], ...]


class Recover(NamedTuple):
    epoch: int


class Finished(NamedTuple):
    steps: int


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
    """``plan`` is None while it waits for one; ``place`` counts the ticks it has collected;
    ``forgotten_steps`` were finished everywhere before the plan came."""

    place: int
    epoch: int
    plan: Plan | None
    replay_place: int
    joined: bool
    finished_steps: int
    forgotten_steps: int
    stream: tuple[Event, ...]


class Server(NamedTuple):
    """A pool server, or a rank's own, whose stream is its rank's."""

    alive: bool
    member: bool
    epoch: int
    plan: Plan | None
    requests: frozenset[Request]
    stream: tuple[Event, ...]


class ControlPlane(NamedTuple):
    """``answers`` is None unless a recovery is under way; an answer is a rank's place."""

    alive: bool
    epoch: int
    answers: tuple[int | None, ...] | None
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

    def first_state(self) -> State:
        """Everybody knows the plans of all steps and nothing has been sent."""
        setting = self.setting
        documents = len(setting.documents)
        plan = Plan(
            epoch=1,
            servers=self._assign(list(range(setting.n_servers)), 1),
            first_tick=((0,) * documents,) * setting.n_steps,
        )
        rank = Rank(0, 1, plan, 0, True, 0, 0, ())
        pool = Server(True, True, 1, plan, frozenset(), ())
        own = Server(True, True, 1, plan, frozenset(), ())
        return State(
            ranks=(rank,) * setting.n_ranks,
            servers=(pool,) * setting.n_servers + (own,) * setting.n_ranks,
            replies=frozenset(),
            control=ControlPlane(True, 1, None, (0,) * setting.n_ranks, 0),
            faults=Faults(setting.crashes, setting.cuts, setting.restarts),
        )

    def is_finished(self, state: State) -> bool:
        return all(rank.place == self.setting.last_place for rank in state.ranks)

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
            and not any(rank.stream or not rank.joined for rank in state.ranks)
            and not any(server.stream for server in state.servers)
            and all(server.alive or not server.member for server in state.servers)
        )

    def _first_move(self, state: State) -> Moves:
        for rank in range(self.setting.n_ranks):
            for move in self._rank_moves(state, rank):
                yield move
                return

    # Ranks.

    def _rank_moves(self, state: State, r: int) -> Moves:
        rank = state.ranks[r]
        if rank.stream:
            yield self._rank_reads(state, r)
        if rank.plan is not None:
            if rank.place < self.setting.last_place:
                yield from self._collects(state, r)
            yield from self._sends(state, r)
            yield from self._misses(state, r)
        if state.control.alive and not rank.joined:
            yield Move(f"rank {r} comes back to the control plane", self._joins(state, r))
        steps_done = self._steps_done(rank)
        if state.control.alive and rank.joined and state.control.reported_steps[r] < steps_done:
            yield Move(f"rank {r} reports its step", self._reports(state, r, steps_done))

    def _rank_reads(self, state: State, r: int) -> Move[State]:
        rank = state.ranks[r]
        event, rest = rank.stream[0], rank.stream[1:]
        rank, own = rank._replace(stream=rest), state.servers[self._own(r)]
        control, replies = state.control, state.replies
        match event:
            case Recover(epoch):
                rank = rank._replace(epoch=epoch, plan=None)
                own = own._replace(epoch=epoch, plan=None, requests=frozenset())
                if self.rules.close_before_answer:
                    replies = frozenset(reply for reply in replies if reply.rank != r)
                if control.alive and control.epoch == epoch and control.answers is not None:
                    control = control._replace(answers=_with(control.answers, r, rank.place))
            case Plan(epoch):
                if epoch >= rank.epoch:
                    rank = rank._replace(
                        plan=event,
                        replay_place=self._replay_place(rank.place),
                        forgotten_steps=rank.finished_steps,
                    )
                    own = own._replace(plan=event, requests=frozenset())
            case Finished(steps):
                rank = rank._replace(finished_steps=steps)
        state = state._replace(
            ranks=_with(state.ranks, r, rank),
            servers=_with(state.servers, self._own(r), own),
            replies=replies,
            control=control,
        )
        return Move(f"rank {r} reads {_name(event)}", self._plan_if_answered(state))

    def _replay_place(self, place: int) -> int:
        # Only the rule that is broken needs it; otherwise it would only multiply states.
        return 0 if self.rules.lanes_are_independent else place

    def _collects(self, state: State, r: int) -> Moves:
        rank = state.ranks[r]
        lane, tick = self.setting.collects[rank.place]
        assert rank.plan is not None
        owing = [s for s, owes in self.exchanges(rank.plan, r, lane, tick) if owes]
        here = {
            reply.server: reply
            for reply in sorted(state.replies)
            if (reply.rank, reply.lane, reply.tick) == (r, lane, tick)
        }
        if not all(server in here for server in owing):
            return
        taken = [here[server] for server in owing]
        self._check_taken(r, lane, tick, rank.plan.epoch, taken)
        gone = {
            reply
            for reply in state.replies
            if (reply.rank, reply.lane, reply.tick) == (r, lane, tick)
        }
        yield Move(
            f"rank {r} completes lane {lane} tick {tick} in epoch {rank.plan.epoch}",
            state._replace(
                ranks=_with(state.ranks, r, rank._replace(place=rank.place + 1)),
                replies=state.replies - gone,
            ),
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

    def _sends(self, state: State, r: int) -> Moves:
        rank = state.ranks[r]
        assert rank.plan is not None
        progress = self.setting.progress[rank.place]
        for lane, (_, begun) in enumerate(progress):
            if not self._lane_may_send(rank, lane):
                continue
            unsent: dict[int, int] = {}
            for tick in range(begun):
                for server, _ in self.exchanges(rank.plan, r, lane, tick):
                    request = Request(r, lane, tick, rank.plan.epoch)
                    if server not in unsent and request not in state.servers[server].requests:
                        unsent[server] = tick
            for server, tick in unsent.items():
                if self._accepts(state.servers[server], rank.plan.epoch):
                    yield self._arrives(state, r, server, lane, tick)

    def _lane_may_send(self, rank: Rank, lane: int) -> bool:
        """False only where the rule is broken: an earlier lane's replay still waits for a reply."""
        if self.rules.lanes_are_independent:
            return True
        then, now = self.setting.progress[rank.replay_place], self.setting.progress[rank.place]
        begun_then = then[lane][1]
        sent_now = now[lane][1] > begun_then
        return sent_now or all(now[i][0] >= then[i][1] for i in range(lane))

    def _accepts(self, server: Server, epoch: int) -> bool:
        if not server.alive or server.plan is None:
            return False
        return server.plan.epoch == epoch or (
            not self.rules.servers_refuse_old and server.plan.epoch > epoch
        )

    def _arrives(self, state: State, r: int, s: int, lane: int, tick: int) -> Move[State]:
        rank, server = state.ranks[r], state.servers[s]
        plan = server.plan
        assert rank.plan is not None
        assert plan is not None
        self._check_kept(rank, r, lane, tick)
        before = server.requests
        server = server._replace(requests=before | {Request(r, lane, tick, rank.plan.epoch)})
        replies = set(state.replies)
        for other in range(self.setting.n_ranks):
            owes = dict(self.exchanges(plan, other, lane, tick)).get(s, False)
            if owes and not self._is_lost(state, other, tick, lane, plan.epoch):
                needed = self.sources(plan, other, s, lane, tick)
                had = {q.rank for q in before if (q.lane, q.tick) == (lane, tick)}
                if needed <= had | {r} and not needed <= had:
                    replies.add(self._reply(server, other, s, lane, tick))
        return Move(
            f"rows of rank {r} for lane {lane} tick {tick} reach {self._server_name(s)} in epoch "
            f"{rank.plan.epoch}",
            state._replace(servers=_with(state.servers, s, server), replies=frozenset(replies)),
        )

    def _is_lost(self, state: State, r: int, tick: int, lane: int, epoch: int) -> bool:
        """Whether a reply goes nowhere: its rank has closed the connection, or lets it go."""
        rank = state.ranks[r]
        connected = rank.plan is not None and rank.plan.epoch == epoch
        if not self.rules.close_before_answer or not self.rules.servers_refuse_old:
            connected = True
        return not connected or self.setting.progress[rank.place][lane][0] > tick

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
        epochs = {
            q.epoch
            for q in server.requests
            if (q.lane, q.tick) == (lane, tick) and q.rank in sources
        }
        return Reply(r, s, lane, tick, pieces, frozenset(epochs | {server.plan.epoch}))

    def _check_kept(self, rank: Rank, r: int, lane: int, tick: int) -> None:
        """The inputs of a tick must be there: those of the last complete tick, those that autograd
        keeps until the layer's backward tick is complete, and those of ticks that have begun."""
        step, in_step = divmod(tick, self.setting.ticks_per_step)
        complete = self.setting.complete_in_step(self.setting.progress[rank.place][lane][0], step)
        last = complete == self.setting.ticks_per_step and not self.rules.keep_until_finished
        kept = complete - 1 if self.rules.keep_last_inputs and not last else complete
        mirrored = self.setting.ticks_per_step - 1 - in_step
        by_autograd = in_step < self.setting.n_layers and complete <= mirrored
        if step < rank.forgotten_steps or not (in_step >= kept or by_autograd):
            raise ModelViolation(
                f"rank {r} has to send tick {in_step} of step {step}, lane {lane} again; it has "
                f"{complete} complete and its inputs are gone"
            )

    def _misses(self, state: State, r: int) -> Moves:
        """A rank loses a pool server of its plan: one that died, or one that lives, by a cut."""
        rank, control = state.ranks[r], state.control
        assert rank.plan is not None
        if not control.alive or not rank.joined:
            return
        if rank.plan.epoch != control.epoch and self.rules.old_reports_change_nothing:
            return
        for s in sorted({s for pieces in rank.plan.servers for s in pieces if self._in_pool(s)}):
            server = state.servers[s]
            if not server.member:
                continue
            # One that has started again does not know the plan, nor will it.
            gone = server.plan != rank.plan and rank.plan not in server.stream
            if gone:
                yield Move(f"rank {r} loses server {s}", self._fence(state, s))
            elif state.faults.cuts:
                faults = state.faults._replace(cuts=state.faults.cuts - 1)
                yield Move(
                    f"a cut: rank {r} gives server {s} up",
                    self._fence(state._replace(faults=faults), s),
                    fault=True,
                )

    def _joins(self, state: State, r: int) -> State:
        rank = state.ranks[r]._replace(joined=True)
        epoch = max(state.control.epoch, rank.epoch if self.rules.epochs_survive else 0)
        control = state.control._replace(
            epoch=epoch,
            finished_steps=max(state.control.finished_steps, rank.finished_steps),
        )
        state = state._replace(ranks=_with(state.ranks, r, rank), control=control)
        return self._recover(state) if all(rank.joined for rank in state.ranks) else state

    def _reports(self, state: State, r: int, steps: int) -> State:
        control = state.control
        control = control._replace(reported_steps=_with(control.reported_steps, r, steps))
        finished = min(control.reported_steps)
        if finished > control.finished_steps:
            control = control._replace(finished_steps=finished)
            state = self._tell_ranks(state, Finished(finished))
        return state._replace(control=control)

    def _steps_done(self, rank: Rank) -> int:
        if self.setting.n_steps == 1:
            return 0
        return min(c for c, _ in self.setting.progress[rank.place]) // self.setting.ticks_per_step

    # Pool servers.

    def _server_moves(self, state: State, s: int) -> Moves:
        server, faults = state.servers[s], state.faults
        if server.alive and server.stream:
            event, rest = server.stream[0], server.stream[1:]
            server = server._replace(stream=rest)
            match event:
                case Recover(epoch) if epoch > server.epoch:
                    server = server._replace(epoch=epoch, plan=None, requests=frozenset())
                case Plan(epoch) if epoch >= server.epoch:
                    server = server._replace(epoch=epoch, plan=event, requests=frozenset())
            yield Move(f"server {s} reads {_name(event)}", self._with_server(state, s, server))
        if server.alive and faults.crashes:
            dead = Server(False, server.member, 0, None, frozenset(), ())
            after = self._with_server(state, s, dead)
            after = after._replace(faults=faults._replace(crashes=faults.crashes - 1))
            yield Move(f"server {s} dies", after, fault=True)
        if not server.alive and not server.member and any(faults):
            again = Server(True, False, 0, None, frozenset(), ())
            yield Move(f"server {s} starts again", self._with_server(state, s, again), fault=True)
        if server.alive and not server.member and state.control.alive and self._may_replan(state):
            member = server._replace(member=True, stream=())
            yield Move(f"server {s} registers", self._with_server(state, s, member))
        if not server.alive and server.member and state.control.alive:
            yield Move(f"the lease of server {s} runs out", self._fence(state, s))

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
        state = self._tell_ranks(state._replace(control=control), Recover(epoch))
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
        plan = Plan(control.epoch, self._assign(members, control.epoch), self._first_ticks(state))
        servers = list(state.servers)
        for s in members:
            if any(s in pieces for pieces in plan.servers):
                servers[s] = servers[s]._replace(stream=(*servers[s].stream, plan))
        state = state._replace(servers=tuple(servers), control=control._replace(answers=None))
        return self._tell_ranks(state, plan)

    def _first_ticks(self, state: State) -> tuple[tuple[int, ...], ...]:
        setting, control = self.setting, state.control
        assert control.answers is not None
        places = [0 if answer is None else answer for answer in control.answers]
        choose = min if self.rules.first_tick_is_least else max
        return tuple(
            tuple(
                setting.ticks_per_step
                if step < control.finished_steps
                else choose(
                    setting.complete_in_step(setting.progress[places[r]][document.lane][0], step)
                    for r in document.ranks
                )
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

    def _tell_ranks(self, state: State, event: Event) -> State:
        return state._replace(
            ranks=tuple(
                rank._replace(stream=(*rank.stream, event)) if rank.joined else rank
                for rank in state.ranks
            )
        )

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
        case Plan(epoch, _, first_tick):
            return f"the plan of epoch {epoch}, first ticks {first_tick}"
        case Finished(steps):
            return f"finished({steps})"
