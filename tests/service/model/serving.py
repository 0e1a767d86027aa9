"""One server and its ranks, in every order: plans, rows, losses, recoveries, late results, a close.

The server is the machine that runs in production, with a shell that delays whatever the executor
does (:mod:`tests.service.model.server`). Its ranks are written down here: they connect, send the
rows that are asked for, and begin anew when they hear of a recovery. What is proved: rows are only
ever taken under the plan that they were sent by; nobody is answered before the rows are there that
the answer needs, nor twice; no tick is forgotten that was begun; no order of events leaves a rank
waiting.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from attention_node.machine.outline import StepOutline, TickOutline
from core_attention.ca_task import Phase
from core_attention.pipelining import Pipelining
from core_attention.schedule import Action, Kind
from core_attention.schedule_orders import SCHEDULES, gpipe
from core_attention.tick import Tick, ticks_of_lane
from core_attention.tick_order import TickOrder, tick_order
from tests.service.model.core import Core, Cores
from tests.service.model.explorer import ModelViolation, Move
from tests.service.model.server import JOB, ModelServer, Reply

MESSAGE_BYTES = 1


@dataclass(frozen=True, kw_only=True)
class Serving:
    """The size of a model: one document over all ranks in each lane, in pipelines one over the
    ranks of each stage.

    Attributes:
        n_ranks, n_layers, n_lanes: sizes.
        forward_only: the step has no backward pass.
        keys_only: the server runs nothing for the document's first rank, which gives only keys.
        frozen: no rank needs gradients: each skips its backward ticks.
        apart: each rank has a document of its own, and may go on without the server at any tick.
        local_rank: the rank whose process the server shares, or None.
        limit_bytes: most memory for messages, each of MESSAGE_BYTES; None for no limit.
        recoveries: how often a recovery may begin.
        resets: how often a connection may be reset, which begins one more.
        unheard: the server hears of a recovery by its plan or a rank alone, and perhaps never of
            the plan before it.
        closes: the job may be closed at any time.
        pipelining: of ranks that form pipelines, with one layer a stage; gives ranks and lanes.
        attention_is_late: the first stage runs the core attention of backwards in two parts with
            the second part, else with the first.
    """

    n_ranks: int = 2
    n_layers: int = 1
    n_lanes: int = 1
    forward_only: bool = False
    keys_only: bool = False
    frozen: bool = False
    apart: bool = False
    local_rank: int | None = None
    limit_bytes: int | None = None
    recoveries: int = 0
    resets: int = 0
    unheard: bool = False
    closes: bool = False
    pipelining: Pipelining | None = None
    attention_is_late: bool = False

    @cached_property
    def order(self) -> TickOrder | None:
        """In which ranks come to their ticks, if they form pipelines."""
        return tick_order(self.pipelining, self.n_lanes) if self.pipelining else None

    def stage(self, r: int) -> int:
        """The stage of a rank; 0 where there are none."""
        return self.pipelining.pipeline_ranks[r] if self.pipelining else 0

    def peers(self, r: int) -> list[int]:
        """The ranks that share a rank's documents, in the order of positions."""
        if self.apart:
            return [r]
        return [other for other in range(self.n_ranks) if self.stage(other) == self.stage(r)]


def piped(name: str, n_stages: int, n_microbatches: int, **others: Any) -> Serving:
    """Pipelines that run a schedule, one for each of ``replicas``."""
    replicas = others.pop("replicas", 1)
    pipelining = Pipelining(
        schedule={**SCHEDULES, "gpipe": gpipe}[name](n_stages, n_microbatches),
        pipeline_ranks=[*range(n_stages)] * replicas,
        layers=[1] * n_stages,
        forward_seconds=[1.0] * n_stages,
        backward_seconds=[2.0] * n_stages,
    )
    n_ranks = n_stages * replicas
    return Serving(n_ranks=n_ranks, n_lanes=n_microbatches, pipelining=pipelining, **others)


class Rank(NamedTuple):
    """``epoch`` of the plan that it runs; by lane, how many ticks it has ``sent``, and how many
    replies it has ``got``; ``news``: epochs of recoveries that it has not heard of yet; ``home``:
    lanes in which it takes part no more."""

    epoch: int
    sent: tuple[int, ...]
    got: tuple[int, ...]
    news: tuple[int, ...]
    home: frozenset[int] = frozenset()


class World(NamedTuple):
    """``stream``: what the control plane tells the server next: an epoch's recovery (negative) or
    plan, or 0, the end of the job."""

    core: Core[ModelServer]
    ranks: tuple[Rank, ...]
    stream: tuple[int, ...]
    epoch: int
    recoveries: int
    resets: int
    may_close: bool


END = 0

Moves = Iterator[Move[World]]

_Changed = tuple[Core[ModelServer], list[Reply]]


class ServingModel:
    """All that can happen to a server in a setting."""

    def __init__(self, setting: Serving) -> None:
        self.setting = setting
        self.new = Rank(1, (0,) * setting.n_lanes, (0,) * setting.n_lanes, ())
        self._outlines: dict[int, StepOutline] = {}
        # What a server does is worked out once for each of its states.
        self._changed: dict[tuple[Core[ModelServer], str], _Changed] = {}
        constants: list[Any] = [tick for lane in self.lanes for tick in lane]
        self._cores: Cores[ModelServer] = Cores(*constants, setting.order)

    @cached_property
    def lanes(self) -> list[list[Tick]]:
        """By lane, its ticks."""
        backward = not self.setting.forward_only
        return [
            list(ticks_of_lane(0, lane, self.setting.n_layers, backward=backward))
            for lane in range(self.setting.n_lanes)
        ]

    def first_state(self) -> World:
        """Nobody has connected and no plan has come."""
        setting = self.setting
        return World(
            core=self._cores.core(ModelServer(setting.n_lanes, setting.limit_bytes, setting.order)),
            ranks=(self.new,) * setting.n_ranks,
            stream=(1,),
            epoch=1,
            recoveries=setting.recoveries,
            resets=setting.resets,
            may_close=setting.closes,
        )

    def is_finished(self, world: World) -> bool:
        """Whether all is served, or the job is over, and nothing is left to be done."""
        server = world.core.value
        if world.stream or server.soon or server.ready or server.gone:
            return False
        return JOB not in server.machine.job_ids or all(
            not rank.news and self._has_all(rank, r) for r, rank in enumerate(world.ranks)
        )

    def moves(self, world: World) -> Moves:
        """Everything that can happen next.

        Raises:
            ModelViolation: the server did what it must not do.
        """
        self._check(world)
        if world.stream:
            yield self._server_hears(world)
        for r in range(self.setting.n_ranks):
            yield from self._rank_moves(world, r)
        server = world.core.value
        if server.ready:
            yield self._changes(world, "the kernel has run a part", ModelServer.run_part)
        if server.soon:
            yield self._changes(
                world, "the executor comes to what is next in its queue", ModelServer.run_soon
            )
        for gone in sorted(server.gone, key=lambda gone: gone.peer):
            yield self._changes(
                world,
                f"the server hears that the connection {gone.peer} has ended",
                lambda server, gone=gone: server.hear_of_loss(gone),
            )
        if world.recoveries:
            less = world._replace(recoveries=world.recoveries - 1)
            yield Move("a recovery begins", self._recovery(less), fault=True)
            if self.setting.unheard and world.stream:
                missed = self._recovery(less._replace(stream=()))
                yield Move("a recovery begins, plans before it are missed", missed, fault=True)
        if world.may_close:
            after = world._replace(may_close=False, stream=(*world.stream, END))
            yield Move("the job is closed", after, fault=True)

    def _check(self, world: World) -> None:
        server = world.core.value
        for tick, (handle, sources) in server.sources.items():
            for rank, peer in sources.items():
                if peer is not None and peer[1] != handle:
                    raise ModelViolation(
                        f"{tick.tick}: rows of rank {rank}, sent in epoch {peer[1]}, were taken "
                        f"under the plan of epoch {handle}"
                    )
        if self.setting.order is not None:
            for peer in server.connected:
                posted = [tick for of, tick in server.posted if of == peer]
                if len(posted) > 1 + self._spare_receives(peer[0]):
                    raise ModelViolation(f"{len(posted)} receives of rank {peer[0]} are posted")
        if self.is_finished(world):
            if server.sources or server.machine.n_open_ticks:
                raise ModelViolation("all is done, and ticks are open")
            if JOB in server.machine.job_ids and not server.machine.idle:
                raise ModelViolation("all is done, and a step is unfinished")

    # What the server hears and does.

    def _server_hears(self, world: World) -> Move[World]:
        news, rest = world.stream[0], world.stream[1:]
        if news == END:
            return self._changes(
                world._replace(stream=rest, ranks=tuple(r._replace(news=()) for r in world.ranks)),
                "the server hears of the end of the job",
                ModelServer.end_job,
            )
        if news < 0:
            return self._changes(
                world._replace(stream=rest),
                f"the server hears of the recovery of epoch {-news}",
                lambda server: server.recover(-news),
            )
        return self._changes(
            world._replace(stream=rest),
            f"the server gets the plan of epoch {news}",
            lambda server: server.plan(news, self._outline(news)),
        )

    def _changes(self, world: World, name: str, change: Any) -> Move[World]:
        """What becomes of the server by ``change``, and of the ranks by its replies."""

        def apply(server: ModelServer) -> list[Reply]:
            change(server)
            replies, server.replies = server.replies, []
            return replies

        if (world.core, name) not in self._changed:
            self._changed[world.core, name] = self._cores.changed(world.core, apply)
        core, replies = self._changed[world.core, name]
        ranks = list(world.ranks)
        for reply in replies:
            self._check_reply(world, reply)
            rank, lane = ranks[reply.rank], reply.tick.nano_batch
            is_heard = reply.peer is None or reply.peer in core.value.connected
            is_heard = is_heard and lane not in rank.home
            if is_heard and rank.epoch == reply.step and self._is_owed(reply.rank, reply.tick):
                place = self.lanes[lane].index(reply.tick)
                if rank.got[lane] > place:
                    raise ModelViolation(f"rank {reply.rank} has two replies of {reply.tick}")
                ranks[reply.rank] = rank._replace(got=_with(rank.got, lane, place + 1))
        return Move(name, world._replace(core=core, ranks=tuple(ranks)))

    def _check_reply(self, world: World, reply: Reply) -> None:
        """Every rank whose rows the reply needs has sent them in this epoch."""
        if not self._is_owed(reply.rank, reply.tick):
            return
        backward = reply.tick.phase is Phase.BACKWARD
        needed = self.setting.n_ranks if backward else reply.rank + 1
        place = self.lanes[reply.tick.nano_batch].index(reply.tick)
        for r in self.setting.peers(reply.rank):
            rank = world.ranks[r]
            if (
                r < needed
                and rank.epoch == reply.step
                and rank.sent[reply.tick.nano_batch] <= place
            ):
                raise ModelViolation(
                    f"rank {reply.rank} has a reply of {reply.tick} without the rows of rank {r}"
                )

    # What ranks do.

    def _rank_moves(self, world: World, r: int) -> Moves:
        rank, server = world.ranks[r], world.core.value
        peer, is_local = (r, rank.epoch), r == self.setting.local_rank
        if rank.news:
            yield self._rank_hears(world, r)
        if not is_local and peer not in server.connected and not any(rank.sent):
            yield self._changes(
                world,
                f"rank {r} connects in epoch {rank.epoch}",
                lambda server: server.connect(peer, 0),
            )
        for lane, ticks in enumerate(self.lanes):
            if rank.sent[lane] < len(ticks):
                tick = ticks[rank.sent[lane]]
                if not self._has_come_to(world, r, tick) or not self._is_awaited(world, r, tick):
                    continue
                if self.setting.apart and lane not in rank.home:
                    yield self._ends_lane(world, r, tick, "goes home before", goes_home=True)
                if not self._may_send(rank, r, lane):
                    continue
                if self.setting.frozen and tick.phase is Phase.BACKWARD:
                    yield self._ends_lane(world, r, tick, "skips")
                else:
                    yield self._sends(world, r, tick)
        if world.resets and peer in server.connected:
            less = self._recovery(world._replace(resets=world.resets - 1))
            yield self._loses(less, r, was_reset=True)

    def _rank_hears(self, world: World, r: int) -> Move[World]:
        """It closes its connection, which the server learns at some time, and begins anew."""
        rank = world.ranks[r]
        epoch, *later = rank.news
        anew = self.new._replace(epoch=epoch, news=tuple(later))
        after = world._replace(ranks=_with(world.ranks, r, anew))
        if (r, rank.epoch) in world.core.value.connected:
            move = self._loses(world, r, was_reset=False)
            after = move.state._replace(ranks=_with(move.state.ranks, r, anew))
        return Move(f"rank {r} hears of the recovery of epoch {epoch}", after)

    def _loses(self, world: World, r: int, *, was_reset: bool) -> Move[World]:
        peer = (r, world.ranks[r].epoch)

        how = "is reset" if was_reset else "is closed"
        move = self._changes(
            world,
            f"the connection {peer} {how}",
            lambda server: server.lose(peer, was_reset=was_reset),
        )
        return Move(move.name, move.state, fault=was_reset)

    def _may_send(self, rank: Rank, r: int, lane: int) -> bool:
        """It has got what it waits for, of the ticks before."""
        return all(
            rank.got[lane] > place
            for place in range(rank.sent[lane])
            if self._is_owed(r, self.lanes[lane][place])
        )

    @cached_property
    def programs(self) -> list[list[tuple[Action, Tick]]]:
        """By stage, the actions with core attention that a rank runs, one after the other."""
        pipelining = self.setting.pipelining
        assert pipelining is not None
        programs = []
        for stage in range(pipelining.schedule.n_stages):
            late = self.setting.attention_is_late and stage == 0
            without = Kind.BACKWARD_INPUT if late else Kind.BACKWARD_WEIGHT
            programs.append(
                [
                    (action, self.lanes[action.microbatch][action.kind is not Kind.FORWARD])
                    for action in pipelining.schedule.order(stage)
                    if action.kind is not without
                ]
            )
        return programs

    def _has_come_to(self, world: World, r: int, tick: Tick) -> bool:
        """Whether a rank of a pipeline is at a tick by its schedule, and has what the stage before
        it, or behind it, gives."""
        pipelining = self.setting.pipelining
        if pipelining is None:
            return True
        program, stage = self.programs[self.setting.stage(r)], self.setting.stage(r)
        at = next(at for at, (_, own) in enumerate(program) if own == tick)
        if not all(self._is_through(world.ranks[r], r, own) for _, own in program[:at]):
            return False
        backward = tick.phase is Phase.BACKWARD
        other = stage + (1 if backward else -1)
        if not 0 <= other < pipelining.schedule.n_stages:
            return True
        before = r - stage + other
        return world.ranks[before].epoch != world.ranks[r].epoch or self._is_through(
            world.ranks[before], before, tick
        )

    def _is_through(self, rank: Rank, r: int, tick: Tick) -> bool:
        """Whether a rank has sent a tick, and has the reply that it waits for."""
        place = self.lanes[tick.nano_batch].index(tick)
        done = rank.got if self._is_owed(r, tick) else rank.sent
        return done[tick.nano_batch] > place

    def _spare_receives(self, r: int) -> int:
        """Of ticks that may come early, but need not."""
        pipelining = self.setting.pipelining
        assert pipelining is not None
        schedule = pipelining.schedule
        kinds = {action.kind for action in schedule.order(0)}
        may_come_early = Kind.BACKWARD_INPUT in kinds and self.setting.stage(r) == 0
        return schedule.n_stages if may_come_early else 0

    def _is_awaited(self, world: World, r: int, tick: Tick) -> bool:
        """Return whether the server takes a tick of a rank now. The rank in its process brings it
        its plans, and must have brought this one."""
        epoch, server = world.ranks[r].epoch, world.core.value
        if r == self.setting.local_rank:
            return epoch not in world.stream and JOB in server.machine.job_ids
        return ((r, epoch), tick) in server.posted

    def _ends_lane(
        self, world: World, r: int, tick: Tick, how: str, *, goes_home: bool = False
    ) -> Move[World]:
        """Let a rank send nothing more of a lane, whether or not a reply is on its way."""
        rank, lane = world.ranks[r], tick.nano_batch
        sent = _with(rank.sent, lane, len(self.lanes[lane]))
        home = rank.home | {lane} if goes_home else rank.home

        def end(server: ModelServer) -> None:
            if r == self.setting.local_rank:
                server.end_local_lane(r, rank.epoch, tick)
            else:
                server.skip((r, rank.epoch), tick)

        after = world._replace(ranks=_with(world.ranks, r, rank._replace(sent=sent, home=home)))
        return self._changes(after, f"rank {r} {how} {tick} in epoch {rank.epoch}", end)

    def _sends(self, world: World, r: int, tick: Tick) -> Move[World]:
        rank, lane = world.ranks[r], tick.nano_batch

        def send(server: ModelServer) -> None:
            if r == self.setting.local_rank:
                server.local_rows_arrive(r, rank.epoch, tick)
            else:
                server.rows_arrive((r, rank.epoch), tick)

        sent = _with(rank.sent, lane, rank.sent[lane] + 1)
        after = world._replace(ranks=_with(world.ranks, r, rank._replace(sent=sent)))
        return self._changes(after, f"rows of rank {r} for {tick} come in epoch {rank.epoch}", send)

    # What belongs to a tick.

    def _recovery(self, world: World) -> World:
        epoch = world.epoch + 1
        news = (epoch,) if self.setting.unheard else (-epoch, epoch)
        return world._replace(
            epoch=epoch,
            # A stream that is watched again tells of the plan again.
            stream=(*world.stream, *news, epoch),
            ranks=tuple(rank._replace(news=(*rank.news, epoch)) for rank in world.ranks),
        )

    def _is_owed(self, r: int, tick: Tick) -> bool:
        return (
            r != self.setting.peers(r)[0]
            or tick.phase is Phase.BACKWARD
            or not self.setting.keys_only
        )

    def _has_all(self, rank: Rank, r: int) -> bool:
        return all(
            rank.sent[lane] == len(ticks)
            and all(
                rank.got[lane] > place or lane in rank.home
                for place, tick in enumerate(ticks)
                if self._is_owed(r, tick)
                and not (self.setting.frozen and tick.phase is Phase.BACKWARD)
            )
            for lane, ticks in enumerate(self.lanes)
        )

    def _outline(self, epoch: int) -> StepOutline:
        if epoch not in self._outlines:
            lanes = {
                lane: {tick: self._tick_outline(tick) for tick in ticks}
                for lane, ticks in enumerate(self.lanes)
            }
            made = StepOutline(0, epoch, self.setting.n_layers, lanes)
            self._outlines[epoch] = made
            outlines = (each for ticks in lanes.values() for each in ticks.values())
            self._cores.share(made, *outlines)
        return self._outlines[epoch]

    def _tick_outline(self, tick: Tick) -> TickOutline:
        """A part for each rank's queries, which read the keys of all ranks up to it."""
        ranks, peers = range(self.setting.n_ranks), self.setting.peers
        pieces = [r for r in ranks if not self.setting.keys_only or r != peers(r)[0]]
        backward = tick.phase is Phase.BACKWARD
        return TickOutline(
            needs=tuple(frozenset(r for r in peers(piece) if r <= piece) for piece in pieces),
            before_reply={
                r: frozenset(
                    number
                    for number, piece in enumerate(pieces)
                    if piece == r or (backward and piece > r and piece in peers(r))
                )
                for r in ranks
            },
            owed=frozenset(r for r in ranks if self._is_owed(r, tick)),
            message_bytes=dict.fromkeys(ranks, MESSAGE_BYTES),
        )


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])
