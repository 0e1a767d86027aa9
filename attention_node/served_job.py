"""A server's knowledge of a job and of each of its steps, and where the time of its ticks went."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from attention_node.machine.outline import StepOutline, TickOutline
from attention_node.machine.tick import TickMachine
from attention_node.open_tick import OpenTick
from attention_node.tick_route import NOTHING, OWN_FLOPS, TickRoute, derive_tick_route
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.first_ticks import FirstTicks
from core_attention.kernels.protocol import Kernel
from core_attention.message import MessageLayout, reply_layout, request_layout
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from core_attention.tick import Tick, ticks_of_lane
from core_attention.tick_order import TickOrder, tick_order
from data_plane.buffer_pool import size_class_bytes
from data_plane.transport import Connection
from distca.contract.codec import pipelining_from_proto, shape_from_proto
from distca.v1 import jobs_pb2

UNDISTURBED_QUANTILE = 0.25
"""The quantile of the times of equal ticks. Not the least one, which a single mismeasured tick
would decide."""

_Key = tuple[int, Phase, int]
"""The key of ticks that run the same tasks: nano-batch, phase and stretch."""


@dataclass(frozen=True, kw_only=True)
class JobDescription:
    """The facts of a job that all its members agree on.

    Attributes:
        job_id: from the control plane.
        verification_key: checks the tokens that ranks show; empty where no server runs.
        n_ranks, n_layers, n_nano_batches: sizes of the job; a layer is a tick of the forward pass.
        shape: heads, head dims and dtype of a tick.
        scale: multiplies q.k before softmax.
        name: what its user called it.
        checksums: messages carry one; None: those that leave their host.
        pipelining: of ranks that form pipelines; None without.
        head_groups: ticks of one call of core attention, which a rank sends together.
        windows: of each call, the keys that a query sees at most, 0 for all; empty: all see all.
    """

    job_id: str
    verification_key: bytes = field(repr=False)
    n_ranks: int
    n_layers: int
    n_nano_batches: int
    shape: AttentionShape
    scale: float
    name: str
    checksums: bool | None = None
    pipelining: Pipelining | None = None
    head_groups: int = 1
    windows: tuple[int, ...] = ()

    def seals(self, connection: Connection) -> bool:
        """Returns whether the messages of a connection, whose handshake is over, carry a
        checksum."""
        return connection.leaves_host if self.checksums is None else self.checksums

    @cached_property
    def call_shape(self) -> AttentionShape:
        """Heads, head dims and dtype of a call."""
        shape, n_groups = self.shape, self.head_groups
        return replace(
            shape,
            num_heads=shape.num_heads * n_groups,
            num_heads_kv=shape.num_heads_kv * n_groups,
        )

    def rule(self, tick: Tick) -> ScoreRule:
        """The rule for the scores of ``tick``."""
        return self._rules[tick.layer // self.head_groups if self.windows else 0]

    @cached_property
    def _rules(self) -> Sequence[ScoreRule]:
        rule = self.shape.rule
        return [replace(rule, window=window or None) for window in self.windows or (0,)]

    @cached_property
    def order(self) -> TickOrder | None:
        """The order in which its ranks come to their ticks, if they form pipelines."""
        if self.pipelining is None:
            return None
        return tick_order(self.pipelining, self.n_nano_batches)

    def first_ticks(self, plan: Plan, first_tick: Int64Array | None) -> FirstTicks:
        """The documents of ``plan`` that take part in each tick."""
        rank_layers = self.pipelining.rank_layers if self.pipelining is not None else None
        return FirstTicks(plan.manifest, first_tick, rank_layers)

    @classmethod
    def from_proto(cls, opened: jobs_pb2.JobOpened) -> JobDescription:
        """Reads the control plane's description of a job, which comes before any plan."""
        return cls(
            job_id=opened.job_id,
            verification_key=opened.verification_key,
            n_ranks=opened.spec.n_ranks,
            n_layers=opened.spec.n_layers,
            n_nano_batches=opened.spec.n_nano_batches,
            shape=shape_from_proto(opened.spec.shape),
            scale=opened.spec.softmax_scale,
            name=opened.spec.name,
            checksums=opened.spec.checksums if opened.spec.HasField("checksums") else None,
            pipelining=(
                pipelining_from_proto(opened.spec.pipelining)
                if opened.spec.HasField("pipelining")
                else None
            ),
            head_groups=opened.spec.head_groups or 1,
            windows=tuple(opened.spec.windows),
        )


@dataclass(frozen=True, kw_only=True)
class StepBusy:
    """Kernel seconds of one server in one step, per nano-batch, without what calls waited for other
    work on the device.

    In place a call shares the GPU with the trainer: whenever one of its kernels ends, a matrix
    product may take the device and hold up the next one for 20 ms, as long as a whole call lasts.
    Ticks of layers with one window run the same tasks, so their times differ only by such
    disturbances: see :func:`undisturbed_seconds`.

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
    """The times of one rank's part of a tick, seen from the server.

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
        """Returns whether the rank waits for rows before it goes on; not if it gives only keys,
        forward."""
        return self.reply.nbytes > 0

    @property
    def pool_bytes(self) -> int:
        """The bytes that a pool takes for both."""
        return size_class_bytes(self.request.nbytes) + size_class_bytes(self.reply.nbytes)


class ServedStep:
    """One planned step on one server: its routes, the layouts of its messages, the tensors of its
    open ticks and how long their kernels ran. What happens to it the server's machine decides.

    Args:
        job: the job.
        plan: the server's slice.
        first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.
        server_id: the server.
        local_rank: the rank whose process the server shares, or None.
        forward_only: whether there is no backward pass.
        device: where tensors live.
        on_tick_over: called when a tick is over, on the executor's thread.

    Attributes:
        outline: what the machine follows.
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
        on_tick_over: Callable[[ServedStep, OpenTick], None],
    ) -> None:
        self.job = job
        self.step = plan.step
        self._device = device
        self._on_tick_over = on_tick_over
        self._local_rank = local_rank
        self._lock = threading.Lock()
        self._open: dict[Tick, OpenTick] = {}
        self._first = job.first_ticks(plan, first_tick)
        self._keys: dict[Tick, _Key] = {}
        self._routes: dict[_Key, TickRoute] = {}
        self._messages: dict[tuple[int, _Key], MessagePair] = {}
        self._outlines: dict[_Key, TickOutline] = {}
        self._busy: dict[tuple[_Key, ScoreRule], list[float]] = {}
        lanes: dict[int, dict[Tick, TickOutline]] = {}
        server = plan.server_index(server_id)
        if server is not None:
            for nano_batch in range(job.n_nano_batches):
                ticks = ticks_of_lane(
                    self.step, nano_batch, job.n_layers, backward=not forward_only
                )
                lanes[nano_batch] = {
                    tick: self._outline(tick)
                    for tick in ticks
                    if self._derive(plan, server, tick).pairs
                }
        self.outline = StepOutline(plan.step, plan.epoch, job.n_layers, lanes)

    def messages(self, rank: int, tick: Tick) -> MessagePair:
        """The layouts of what is exchanged with ``rank`` in ``tick``, one of its expected ones."""
        job, key = self.job, (rank, self._key(tick))
        if key not in self._messages:
            pair = self._route(tick).pairs[rank]
            self._messages[key] = MessagePair(
                request_layout(pair, job.shape, tick.phase),
                reply_layout(pair, job.shape, tick.phase),
            )
        return self._messages[key]

    def prepare(self, kernel: Kernel) -> None:
        """Has ``kernel`` derive ahead what the step's ticks need."""
        for (_, phase, _), route in self._routes.items():
            for part in route.parts:
                kernel.prepare(part.tasks, phase)

    def held_bytes(self) -> Mapping[Any, list[int]]:
        """The sizes in bytes of all messages that are held at a time, by phase: of each rank and
        nano-batch those of a call, or of two where the rank may be a call ahead. In pipelines by
        slot, of each rank those of its action there."""
        if self.job.order is not None:
            return _held_by_slot(self.job.order, self.outline, self._sizes)
        held: dict[Phase, list[int]] = {phase: [] for phase in Phase}
        for ticks in self.outline.lanes.values():
            for phase in Phase:
                first = next((tick for tick in ticks if tick.phase is phase), None)
                if first is None:
                    continue
                for rank in self._remote_ranks(first):
                    held[phase] += self._sizes(rank, first)
        return held

    def _sizes(self, rank: int, tick: Tick) -> list[int]:
        """The sizes of the messages that are held at a time of a rank's ticks such as this."""
        pair = self.messages(rank, tick)
        n_ticks = self.job.head_groups * (1 if pair.owes_reply else 2)
        return [pair.request.nbytes, pair.reply.nbytes] * n_ticks

    def open_tick(self, machine: TickMachine) -> OpenTick:
        """The tensors of a tick, begun if need be."""
        tick = machine.tick
        with self._lock:
            if tick not in self._open:
                self._open[tick] = OpenTick(
                    machine=machine,
                    route=self._route(tick),
                    shape=self.job.shape,
                    rule=self.job.rule(tick),
                    scale=self.job.scale,
                    device=self._device,
                    on_closed=self._close_tick,
                )
            return self._open[tick]

    def busy(self) -> StepBusy:
        """The kernel seconds of the ticks that are over. Call it on the executor's thread."""
        seconds = {phase: [0.0] * self.job.n_nano_batches for phase in Phase}
        backward_layers = [0] * self.job.n_nano_batches
        for ((nano_batch, phase, _), _), ticks in self._busy.items():
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

    def _key(self, tick: Tick) -> _Key:
        # Asked for many times a tick, and a search in an array each time otherwise.
        key = self._keys.get(tick)
        if key is None:
            stretch = self._first.stretch(tick.nano_batch, tick.lane_index(self.job.n_layers))
            key = self._keys[tick] = tick.nano_batch, tick.phase, stretch
        return key

    def _route(self, tick: Tick) -> TickRoute:
        return self._routes[self._key(tick)]

    def _remote_ranks(self, tick: Tick) -> Set[int]:
        return self._route(tick).pairs.keys() - {self._local_rank}

    def _derive(self, plan: Plan, server: int, tick: Tick) -> TickRoute:
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
                    self._local_rank,
                    self._first.documents(nano_batch, stretch),
                    self._own_pairs(phase),
                )
                if stretch >= 0
                else NOTHING
            )
        return self._routes[key]

    def _own_pairs(self, phase: Phase) -> int:
        pair_flops = self.job.shape.qk_flops(1, backward=phase is Phase.BACKWARD)
        return max(1, int(OWN_FLOPS[self._device.type] // pair_flops))

    def _outline(self, tick: Tick) -> TickOutline:
        key = self._key(tick)
        if key not in self._outlines:
            pairs = {rank: self.messages(rank, tick) for rank in self._remote_ranks(tick)}
            self._outlines[key] = self._route(tick).outline(
                tick.phase,
                owed=frozenset(rank for rank, pair in pairs.items() if pair.owes_reply),
                message_bytes={rank: pair.pool_bytes for rank, pair in pairs.items()},
            )
        return self._outlines[key]

    def _close_tick(self, open_tick: OpenTick) -> None:
        """Runs on the executor's thread."""
        tick = open_tick.tick
        with self._lock:
            self._open.pop(tick, None)
        alike = self._key(tick), open_tick.rule
        self._busy.setdefault(alike, []).append(open_tick.busy_seconds)
        self._on_tick_over(self, open_tick)


def _held_by_slot(
    order: TickOrder, outline: StepOutline, sizes: Callable[[int, Tick], list[int]]
) -> dict[int, list[int]]:
    """The sizes in bytes of the messages that are held in each slot, of each rank those of its
    action there; see ``attention_node.machine.turns``."""
    held: defaultdict[int, list[int]] = defaultdict(list)
    counted: set[tuple[int, int, int]] = set()
    for nano_batch, ticks in outline.lanes.items():
        for tick, each in ticks.items():
            for rank in each.message_bytes:
                for slot in order.slots(rank, tick):
                    # Of all calls of an action, one at a time.
                    if (slot, rank, nano_batch) not in counted:
                        counted.add((slot, rank, nano_batch))
                        held[slot] += sizes(rank, tick)
    return held
