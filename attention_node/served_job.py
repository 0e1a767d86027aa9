"""What a server knows of a job: its plans, and the ticks that its ranks are expected to send."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from attention_node.memory_gate import pair_bytes
from attention_node.open_tick import OpenTick, TickGivenUp
from attention_node.tick_route import NOTHING, TickRoute, derive_tick_route
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.first_ticks import FirstTicks
from core_attention.kernels.protocol import Kernel
from core_attention.message import MessageLayout, reply_layout, request_layout
from core_attention.plan import Plan
from core_attention.shape import AttentionShape
from core_attention.tick import Tick, ticks_of_lane
from distca.contract.codec import shape_from_proto
from distca.v1 import jobs_pb2

logger = logging.getLogger(__name__)

UNDISTURBED_QUANTILE = 0.25
"""Of the times of equal ticks. Not the least one, which a single mismeasured tick would decide."""

REMEMBERED_PLANS = 4096
"""Plans of a job that a server tells apart from ones that it has not seen. A control plane repeats
those of unfinished steps only, of which it keeps far fewer."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """What all members of a job agree on.

    Attributes:
        job_id: from the control plane.
        verification_key: checks the tokens that ranks show; empty where no server runs.
        n_ranks, n_layers, n_nano_batches: sizes of the job.
        shape: heads, head dims and dtype.
        scale: multiplies q.k before softmax.
        name: what its user called it.
        checksums: messages carry one.
    """

    job_id: str
    verification_key: bytes = field(repr=False)
    n_ranks: int
    n_layers: int
    n_nano_batches: int
    shape: AttentionShape
    scale: float
    name: str
    checksums: bool = False

    @classmethod
    def from_proto(cls, opened: jobs_pb2.JobOpened) -> JobDescription:
        """What the control plane says of a job before any plan.

        Raises:
            distca.contract.codec.WireError: the shape is malformed.
        """
        return cls(
            job_id=opened.job_id,
            verification_key=opened.verification_key,
            n_ranks=opened.spec.n_ranks,
            n_layers=opened.spec.n_layers,
            n_nano_batches=opened.spec.n_nano_batches,
            shape=shape_from_proto(opened.spec.shape),
            scale=opened.spec.softmax_scale,
            name=opened.spec.name,
            checksums=opened.spec.checksums,
        )


@dataclass(frozen=True, kw_only=True)
class StepBusy:
    """Kernel seconds of one server in one step, per nano-batch, without what calls waited for other
    work on the device.

    In place a call shares the GPU with the trainer: whenever one of its kernels ends, a matrix
    product may take the device and hold up the next one for 20 ms, as long as a whole call lasts.
    Ticks of different layers run the same tasks, so their times differ only by such disturbances:
    see :func:`undisturbed_seconds`.

    Attributes:
        backward_layers: per nano-batch, how many backward ticks were run: fewer than the job has
            layers where ranks needed no gradients from some layer down.
    """

    job_id: str
    step: int
    forward_seconds: tuple[float, ...]
    backward_seconds: tuple[float, ...]
    backward_layers: tuple[int, ...]


def undisturbed_seconds(ticks: Sequence[float]) -> float:
    """The sum of the kernel seconds of ticks that run the same tasks, without disturbances: the
    lower quartile in place of each."""
    return len(ticks) * float(np.quantile(ticks, UNDISTURBED_QUANTILE))


@dataclass(frozen=True, kw_only=True)
class ExchangeTimes:
    """Where the time of one rank's part of a tick went, seen from the server.

    Attributes:
        tick: which exchange.
        rank: whose part.
        job_id: of the job.
        began_at: ``time.monotonic()`` when the rank's request had arrived.
        wait_seconds: from its request's arrival to its reply, without the kernel calls: waiting for
            other ranks' rows and for the device.
        kernel_seconds: wall seconds of the kernel calls that its tick was part of meanwhile.
        transport_seconds: of its request and its reply; None for the local rank, whose rows do not
            travel.
    """

    tick: Tick
    rank: int
    job_id: str
    began_at: float
    wait_seconds: float
    kernel_seconds: float
    transport_seconds: float | None = None


@dataclass(frozen=True, eq=False)
class MessagePair:
    """Sizes and sections of what one rank exchanges in a tick of one (nano-batch, phase)."""

    request: MessageLayout
    reply: MessageLayout

    @property
    def owes_reply(self) -> bool:
        """Whether the rank waits for rows before it goes on; not if it gives only keys, forward."""
        return self.reply.nbytes > 0


class ServedStep:
    """One planned step on one server: routes, open ticks, and what is still to come.

    Args:
        job: the job.
        plan: the server's slice.
        first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.
        server_id: the server.
        local_rank: the rank whose process the server shares, or None.
        forward_only: whether there is no backward pass.
        device: where tensors live.
        lock: guards the open ticks.
        on_tick_over: called when a tick is over, on the executor's thread.
        on_finished: called once, when the last tick is over or a tick has failed.
    """

    def __init__(
        self,
        job: JobDescription,
        plan: Plan,
        *,
        first_tick: Int64Array | None = None,
        server_id: str,
        local_rank: int | None,
        forward_only: bool,
        device: torch.device,
        lock: threading.RLock,
        on_finished: Callable[[ServedStep], None],
        on_tick_over: Callable[[ServedStep, Tick], None] = lambda step, tick: None,
    ) -> None:
        self.job = job
        self.step = plan.step
        self.epoch = plan.epoch
        self._device = device
        self._lock = lock
        self._on_finished = on_finished
        self._on_tick_over = on_tick_over
        self._local_rank = local_rank
        self._open: dict[Tick, OpenTick] = {}
        self._over: set[Tick] = set()
        self._lane_ends: dict[tuple[int, int], int] = {}
        self._given_up = ""
        self._first = FirstTicks(plan.manifest, first_tick)
        self._routes: dict[tuple[int, Phase, int], TickRoute] = {}
        self._messages: dict[tuple[int, int, Phase, int], MessagePair] = {}
        self._needs: dict[tuple[int, Phase, int], int] = {}
        self._ticks: dict[int, list[Tick]] = {}
        self._busy: dict[tuple[int, Phase, int], list[float]] = {}
        server = plan.server_index(server_id)
        if server is not None:
            for nano_batch in range(job.n_nano_batches):
                self._ticks[nano_batch] = [
                    tick
                    for tick in ticks_of_lane(
                        self.step, nano_batch, job.n_layers, backward=not forward_only
                    )
                    if self._derive(plan, server, tick, local_rank).pairs
                ]
        self._ticks_left = sum(map(len, self._ticks.values()))

    def messages(self, rank: int, tick: Tick) -> MessagePair:
        """The layouts of what is exchanged with ``rank`` in ``tick``, one of its expected ones."""
        job, key = self.job, (rank, *self._key(tick))
        if key not in self._messages:
            pair = self._route(tick).pairs[rank]
            self._messages[key] = MessagePair(
                request_layout(pair, job.shape, tick.phase, checksums=job.checksums),
                reply_layout(pair, job.shape, tick.phase, checksums=job.checksums),
            )
        return self._messages[key]

    def prepare(self, kernel: Kernel) -> None:
        """Has ``kernel`` derive ahead what the step's ticks need."""
        for (_, phase, _), route in self._routes.items():
            for part in route.parts:
                kernel.prepare(part.tasks, phase)

    @property
    def finished(self) -> bool:
        return self._ticks_left == 0

    @property
    def given_up(self) -> str:
        """Why it was given up; empty if it was not."""
        return self._given_up

    @property
    def open_ticks(self) -> list[OpenTick]:
        with self._lock:
            return list(self._open.values())

    def has_rank(self, rank: int) -> bool:
        """Whether ``rank`` exchanges anything with the server in this step."""
        return any(rank in route.pairs for route in self._routes.values())

    def expected_ticks(self, rank: int, nano_batch: int) -> list[Tick]:
        """The ticks of a nano-batch in which ``rank`` sends something, in order."""
        return [tick for tick in self._ticks.get(nano_batch, ()) if rank in self._route(tick).pairs]

    def message_bytes(self) -> dict[int, list[tuple[Tick, int]]]:
        """By nano-batch, its ticks in order, each with the memory of all its messages."""
        return {
            nano_batch: [(tick, self._message_bytes(tick)) for tick in ticks]
            for nano_batch, ticks in self._ticks.items()
            if ticks
        }

    def held_bytes(self) -> dict[Phase, list[int]]:
        """By phase, the sizes in bytes of all messages that are held at a time: of each rank and
        nano-batch those of a tick, or of two where the rank may be a tick ahead."""
        held: dict[Phase, list[int]] = {phase: [] for phase in Phase}
        for ticks in self._ticks.values():
            for phase in Phase:
                first = next((tick for tick in ticks if tick.phase is phase), None)
                if first is None:
                    continue
                for rank in self._route(first).pairs.keys() - {self._local_rank}:
                    pair = self.messages(rank, first)
                    ticks_at_a_time = 1 if pair.owes_reply else 2
                    held[phase] += [pair.request.nbytes, pair.reply.nbytes] * ticks_at_a_time
        return held

    def _message_bytes(self, tick: Tick) -> int:
        key = self._key(tick)
        if key not in self._needs:
            ranks = self._route(tick).pairs.keys() - {self._local_rank}
            messages = [self.messages(rank, tick) for rank in ranks]
            self._needs[key] = sum(pair_bytes((m.request.nbytes, m.reply.nbytes)) for m in messages)
        return self._needs[key]

    def give_up(self, reason: str) -> list[OpenTick]:
        """Opens no more ticks; returns those that are open, for the executor to end."""
        with self._lock:
            self._given_up = self._given_up or reason
            return list(self._open.values())

    def open_tick(self, tick: Tick) -> OpenTick:
        """The state of ``tick``, begun if need be.

        Raises:
            TickGivenUp: the step was given up, or the tick is over, or a rank that takes part in
                it has ended its lane; says why.
        """
        with self._lock:
            if self._given_up:
                raise TickGivenUp(self._given_up)
            if tick in self._over:
                raise TickGivenUp(f"{tick} is over on this server")
            if self._ended_ranks(tick):
                raise self._without_backward(tick)
            if tick not in self._open:
                self._open[tick] = OpenTick(
                    tick=tick,
                    route=self._route(tick),
                    shape=self.job.shape,
                    scale=self.job.scale,
                    device=self._device,
                    on_closed=self._close_tick,
                )
            return self._open[tick]

    def end_lane(self, rank: int, first: Tick) -> list[tuple[OpenTick, TickGivenUp]]:
        """``rank`` sends nothing of the lane of ``first`` any more, from ``first`` on: it needs no
        gradients from that layer down. Ticks in which only such ranks take part are over.

        Runs on the executor's thread. Returns open ticks that others take part in, which cannot be
        completed, and why.
        """
        with self._lock:
            self._lane_ends[rank, first.nano_batch] = first.lane_index(self.job.n_layers)
            ended = [
                tick
                for tick in self._ticks.get(first.nano_batch, ())
                if tick not in self._over and self._ended_ranks(tick)
            ]
            over = [
                tick for tick in ended if self._ended_ranks(tick) == self._route(tick).pairs.keys()
            ]
            self._over.update(over)
            self._ticks_left -= len(over)
            stuck = [
                (self._open[tick], self._without_backward(tick))
                for tick in ended
                if tick in self._open
            ]
        for tick in over:
            self._on_tick_over(self, tick)
        if over and self.finished and not self._given_up:
            self._on_finished(self)
        return stuck

    def _ended_ranks(self, tick: Tick) -> set[int]:
        """The ranks of ``tick`` whose lane ends before it."""
        if not self._lane_ends:
            return set()
        index = tick.lane_index(self.job.n_layers)
        return {
            rank
            for rank in self._route(tick).pairs
            if self._lane_ends.get((rank, tick.nano_batch), index + 1) <= index
        }

    def _without_backward(self, tick: Tick) -> TickGivenUp:
        ended = self._ended_ranks(tick)
        others = sorted(self._route(tick).pairs.keys() - ended)
        return TickGivenUp(
            f"{tick}: ranks {sorted(ended)} need no gradients from layer {tick.layer} down, and "
            f"ranks {others} do; ranks that share documents must train the same layers"
        )

    def busy(self) -> StepBusy:
        """Of the ticks that are over."""
        seconds = {phase: [0.0] * self.job.n_nano_batches for phase in Phase}
        backward_layers = [0] * self.job.n_nano_batches
        with self._lock:
            for (nano_batch, phase, _), ticks in self._busy.items():
                seconds[phase][nano_batch] += undisturbed_seconds(ticks)
                if phase is Phase.BACKWARD:
                    backward_layers[nano_batch] += len(ticks)
        return StepBusy(
            job_id=self.job.job_id,
            step=self.step,
            forward_seconds=tuple(seconds[Phase.FORWARD]),
            backward_seconds=tuple(seconds[Phase.BACKWARD]),
            backward_layers=tuple(backward_layers),
        )

    def _key(self, tick: Tick) -> tuple[int, Phase, int]:
        stretch = self._first.stretch(tick.nano_batch, tick.lane_index(self.job.n_layers))
        return tick.nano_batch, tick.phase, stretch

    def _route(self, tick: Tick) -> TickRoute:
        return self._routes[self._key(tick)]

    def _derive(self, plan: Plan, server: int, tick: Tick, local_rank: int | None) -> TickRoute:
        """The route of ``tick``, the same for all ticks of a phase in which the same documents take
        part."""
        key = nano_batch, phase, stretch = self._key(tick)
        if key not in self._routes:
            self._routes[key] = (
                derive_tick_route(
                    plan,
                    server,
                    nano_batch,
                    phase,
                    local_rank,
                    self._first.documents(nano_batch, stretch),
                )
                if stretch >= 0
                else NOTHING
            )
        return self._routes[key]

    def _close_tick(self, open_tick: OpenTick) -> None:
        """Runs on the executor's thread. A tick that failed fails the whole step: the ranks that it
        owed a reply cannot go on, and those that are still to send must be told."""
        tick, failure = open_tick.tick, open_tick.failure
        others: list[OpenTick] = []
        with self._lock:
            self._open.pop(tick, None)
            self._over.add(tick)
            self._busy.setdefault(self._key(tick), []).append(open_tick.busy_seconds)
            self._ticks_left -= 1
            failed_now = failure is not None and not self._given_up
            if failed_now:
                others = self.give_up(f"{tick} failed: {failure}")
        self._on_tick_over(self, tick)
        for other in others:
            other.give_up(TickGivenUp(self._given_up))
        if failed_now or (self.finished and not self._given_up):
            self._on_finished(self)


@dataclass(eq=False)
class ServedJob:
    """A job on one server.

    Attributes:
        description: what its members agree on.
        epoch: of the last recovery; plans and connections of lower epochs are void.
        steps: planned and unfinished steps, by number.
        refused: why steps cannot be served, by epoch and number.
    """

    description: JobDescription
    epoch: int = 0
    steps: dict[int, ServedStep] = field(default_factory=dict)
    refused: dict[tuple[int, int], str] = field(default_factory=dict)
    _seen: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)

    def is_new(self, plan: Plan) -> bool:
        """Whether ``plan`` comes for the first time; a stream that is watched again repeats the
        plans of unfinished steps."""
        key = (plan.step, plan.epoch)
        if key in self._seen:
            return False
        self._seen[key] = None
        while len(self._seen) > REMEMBERED_PLANS:
            self._seen.popitem(last=False)
        return True


@dataclass(frozen=True)
class ExpectedTick:
    """A tick that a rank is to send.

    Attributes:
        step: its step.
        tick: which exchange.
        owes_reply: see :class:`MessagePair`.
    """

    step: ServedStep
    tick: Tick
    owes_reply: bool


@dataclass(eq=False)
class Lane:
    """The ticks that one rank is still to send for one nano-batch, in order.

    A rank sends a layer's rows when it has got those of the layer before. So a receive is posted
    when the reply before it has left, and no memory is held for a message that cannot come yet.
    Only a rank that is owed nothing may be a tick ahead.

    Attributes:
        expected: ticks for which no receive is posted yet, by step.
        under_way: ticks whose receives are posted, or that are being served.
    """

    expected: deque[ExpectedTick] = field(default_factory=deque)
    under_way: dict[Tick, ExpectedTick] = field(default_factory=dict)

    def extend(self, step: ServedStep, rank: int, nano_batch: int) -> None:
        """Adds the ticks of ``step``, before those of later steps: a step whose planning failed
        at first is planned after them."""
        later = [entry for entry in self.expected if entry.step.step > step.step]
        for _ in later:
            self.expected.pop()
        self.expected.extend(
            ExpectedTick(step, tick, step.messages(rank, tick).owes_reply)
            for tick in step.expected_ticks(rank, nano_batch)
        )
        self.expected.extend(later)

    def next_to_post(self) -> ExpectedTick | None:
        """Takes the tick to post a receive for; None if it cannot come yet. Those of later steps
        do not hold it up: their messages come after the tick's."""
        if not self.expected:
            return None
        entry = self.expected[0]
        before = [other for tick, other in self.under_way.items() if tick.step <= entry.tick.step]
        if len(before) > 1 or any(other.owes_reply for other in before):
            return None
        self.under_way[entry.tick] = self.expected.popleft()
        return entry

    def end(self, step: ServedStep) -> None:
        """The rank sends nothing of ``step`` any more."""
        self.expected = deque(entry for entry in self.expected if entry.step is not step)
        self.under_way = {
            tick: entry for tick, entry in self.under_way.items() if entry.step is not step
        }

    def put_back(self, entry: ExpectedTick) -> None:
        """Undoes :meth:`next_to_post`: no receive is posted after all."""
        del self.under_way[entry.tick]
        self.expected.appendleft(entry)
