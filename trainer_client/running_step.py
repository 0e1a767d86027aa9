"""A step while it runs: its exchanges with every server, its calls, what it measured."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch

from attention_node.served_job import JobDescription
from attention_node.tick_server import TickServer
from core_attention.ca_task import Phase
from core_attention.message import MessageLayout, reply_layout, request_layout
from core_attention.plan import Plan
from core_attention.routing import PairRoute, derive_routes
from data_plane.buffer_pool import BufferPool
from data_plane.transport import Connection
from trainer_client.errors import CoreAttentionFailed
from trainer_client.metrics import OWN_PROCESS, ServedTasks, TrainerMetrics


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time in a step.

    Attributes:
        lane: where: ``"nano-batch 0"``, ``"in-place server"``, ...
        name: what: ``"compute"``, ``"wait"``, ``"send"``, ``"kernel"``.
        begin_seconds, end_seconds: since the step began.
        detail: layer and phase, in words.
    """

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a rank measured in one step.

    Attributes:
        step: which.
        tokens: of this rank.
        step_seconds: wall seconds from the plan's arrival to the end of the step.
        plan_wait_seconds: wall seconds that the step waited for its plan.
        wait_seconds: of ``step_seconds``, blocked on results of core attention.
        send_seconds: of ``step_seconds``, spent packing and handing over requests.
        sent_bytes, received_bytes: to and from other processes.
    """

    step: int
    tokens: int
    step_seconds: float
    plan_wait_seconds: float
    wait_seconds: float
    send_seconds: float
    sent_bytes: int
    received_bytes: int


@dataclass(frozen=True, eq=False)
class Exchange:
    """What this rank exchanges with one server in the ticks of one (nano-batch, phase).

    Attributes:
        server_id: the server.
        connection: to it; None if it is this process's own in-place server.
        route: which rows.
        request, reply: message layouts.
        q_rows, kv_rows: int64 packed rows on the device, in message order.
    """

    server_id: str
    connection: Connection | None
    route: PairRoute
    request: MessageLayout
    reply: MessageLayout
    q_rows: torch.Tensor
    kv_rows: torch.Tensor


class Outstanding(Protocol):
    """Something of a step that holds buffers until its results are collected."""

    def give_up(self) -> None:
        """Lets go of what will not be collected."""


@dataclass(eq=False)
class RunningStep:
    """One step of a session; made by ``Session.step``.

    Attributes:
        plan: this rank's slice.
        rank: this rank.
        job: what the job's members agree on.
        forward_only: whether there is no backward pass.
        connections: by server id, to all servers of the plan that are other processes.
        in_place: this process's own server, or None.
        pool: message buffers.
        device: of the model's tensors.
        tick_timeout_seconds: deadline of each tick.
        check: raises what ended the session, if something did.
        metrics: told of every tick.
        outstanding: calls of core attention between their two halves.
    """

    plan: Plan
    rank: int
    job: JobDescription
    forward_only: bool
    connections: Mapping[str, Connection]
    in_place: TickServer | None
    pool: BufferPool
    device: torch.device
    tick_timeout_seconds: float
    check: Callable[[], None]
    metrics: TrainerMetrics
    trace: list[TraceEvent] = field(default_factory=list)
    report: StepReport | None = None
    wait_seconds: float = 0.0
    send_seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    began_seconds: float = field(default_factory=time.perf_counter)
    closed: bool = False
    outstanding: set[Outstanding] = field(default_factory=set)
    _layers: dict[int, int] = field(default_factory=dict)
    _backward_ticks: int = 0
    _verified: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def step(self) -> int:
        return self.plan.step

    @cached_property
    def exchanges(self) -> Mapping[tuple[int, Phase], tuple[Exchange, ...]]:
        """By (nano-batch, phase): this rank's exchanges, by server in the plan's order."""
        return {
            (nano_batch, phase): tuple(self._exchanges(nano_batch, phase))
            for nano_batch in range(self.job.n_nano_batches)
            for phase in Phase
        }

    @cached_property
    def positions(self) -> tuple[torch.Tensor, ...]:
        """By nano-batch: ``[rows]`` each packed row's position in its document, int64."""
        positions = []
        for nano_batch in range(self.job.n_nano_batches):
            rows = torch.empty(self.n_rows(nano_batch), dtype=torch.int64)
            for row, offset, length in self.segments(nano_batch):
                rows[row : row + length] = torch.arange(offset, offset + length)
            positions.append(rows)
        return tuple(positions)

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        """(packed row, offset in its document, length) of this rank's segments, by row."""
        manifest = self.plan.manifest
        nano = manifest.document_nano_batch[manifest.segment_document]
        mine = (manifest.segment_rank == self.rank) & (nano == nano_batch)
        return sorted(
            zip(
                manifest.segment_row[mine].tolist(),
                manifest.segment_offset[mine].tolist(),
                manifest.segment_length[mine].tolist(),
                strict=True,
            )
        )

    def n_rows(self, nano_batch: int) -> int:
        """Packed rows of this rank's nano-batch."""
        return self._n_rows[nano_batch]

    @cached_property
    def _n_rows(self) -> tuple[int, ...]:
        manifest = self.plan.manifest
        return tuple(
            int(manifest.tokens_per_rank(nano_batch)[self.rank])
            for nano_batch in range(self.job.n_nano_batches)
        )

    def next_layer(self, nano_batch: int) -> int:
        """Counts a nano-batch's attention calls.

        Raises:
            CoreAttentionFailed: the model calls attention more often than the job said.
        """
        layer = self._layers.get(nano_batch, 0)
        if layer >= self.job.n_layers:
            raise CoreAttentionFailed(
                f"step {self.step}: nano-batch {nano_batch} calls core attention a "
                f"{layer + 1}th time, but the job has n_layers={self.job.n_layers}; set n_layers "
                "to the calls in one forward, run each nano-batch once a step, and leave "
                "attention out of activation checkpointing"
            )
        self._layers[nano_batch] = layer + 1
        return layer

    def verified(self, nano_batch: int, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was checked before: layers hand over the same one."""
        return (nano_batch, id(tensor)) in self._verified

    def mark_verified(self, nano_batch: int, tensor: torch.Tensor) -> None:
        """Remembers a checked tensor (and keeps it, so that its id stays its own)."""
        self._verified[nano_batch, id(tensor)] = tensor

    def backward_tick_done(self) -> None:
        """Counts finished backward ticks, to tell whether the step ran to its end."""
        self._backward_ticks += 1

    @property
    def called(self) -> bool:
        """Whether core attention was called at all; True for a step without rows."""
        return bool(self._layers) or not any(self._n_rows)

    @property
    def complete(self) -> bool:
        """Whether every tick that servers expect of this rank was run."""
        calls = self.job.n_layers * self.job.n_nano_batches
        forward = sum(self._layers.values()) == calls
        return forward and (self.forward_only or self._backward_ticks == calls)

    def served_tasks(self) -> Iterator[ServedTasks]:
        """What every server ran for this rank, if the step is complete."""
        for (_, phase), exchanges in self.exchanges.items():
            if phase is Phase.BACKWARD and self.forward_only:
                continue
            for exchange in exchanges:
                route, connection = exchange.route, exchange.connection
                yield ServedTasks(
                    server_id=exchange.server_id,
                    transport=OWN_PROCESS if connection is None else connection.transport,
                    phase=phase,
                    tasks=len(route.task) * self.job.n_layers,
                    q_rows=route.n_q_rows * self.job.n_layers,
                    kv_rows=route.n_kv_rows * self.job.n_layers,
                )

    @contextmanager
    def timed(self, lane: str, name: str, detail: str = "") -> Iterator[None]:
        """Records a :class:`TraceEvent` around a block."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            end = time.perf_counter()
            self.record(lane, name, begin, end, detail)
            if name == "wait":
                self.wait_seconds += end - begin
            elif name == "send":
                self.send_seconds += end - begin

    def record(self, lane: str, name: str, begin: float, end: float, detail: str = "") -> None:
        """Adds an event with times on ``time.perf_counter``'s clock."""
        with self._lock:
            self.trace.append(
                TraceEvent(lane, name, begin - self.began_seconds, end - self.began_seconds, detail)
            )

    def _exchanges(self, nano_batch: int, phase: Phase) -> Iterator[Exchange]:
        shape = self.job.shape
        for (rank, index), route in derive_routes(
            self.plan.manifest, self.plan.tasks(phase), nano_batch
        ).items():
            if rank != self.rank:
                continue
            server = self.plan.servers[index]
            yield Exchange(
                server_id=server.server_id,
                connection=self.connections.get(server.server_id),
                route=route,
                request=request_layout(route, shape, phase),
                reply=reply_layout(route, shape, phase),
                q_rows=torch.from_numpy(route.q_rows).to(self.device),
                kv_rows=torch.from_numpy(route.kv_rows).to(self.device),
            )
