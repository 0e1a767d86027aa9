"""What a rank exchanges with each server while one plan of a step is in force."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from attention_node.served_job import JobDescription
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.host_copies import on_device
from core_attention.message import MessageLayout, reply_layout, request_layout
from core_attention.message_rows import MessageRows, message_rows
from core_attention.plan import Plan
from core_attention.routing import PairRoute, derive_routes
from core_attention.tick import Tick
from data_plane.transport import Connection


@dataclass(frozen=True, eq=False)
class Exchange:
    """What this rank exchanges with one server in some ticks of a (nano-batch, phase).

    Attributes:
        plan: this rank's slice of the plan in force.
        server_id: the server.
        connection: to it; None if it is this process's own in-place server.
        route: which rows.
        request, reply: message layouts.
        kv_rows: int64 packed rows of keys on the device, in message order.
        rows: puts rows into requests and takes them out of replies.
    """

    plan: Plan
    server_id: str
    connection: Connection | None
    route: PairRoute
    request: MessageLayout
    reply: MessageLayout
    kv_rows: torch.Tensor
    rows: MessageRows


@dataclass(frozen=True, eq=False)
class ServerRows:
    """What this rank exchanges with one server, whatever the connection; see :class:`Exchange`."""

    server_id: str
    route: PairRoute
    request: MessageLayout
    reply: MessageLayout
    kv_rows: torch.Tensor
    rows: MessageRows


class Routes:
    """This rank's routes under a plan: derived when first asked for, or ahead, and then kept.
    Thread-safe: two threads may derive the same route, which is then the same.

    Args:
        plan: this rank's slice.
        first_tick: ``[n_documents]`` where each document begins under this plan; None at 0.
        rank: this rank.
        own_server_id: this process's server, with which no messages are exchanged.
        job: what the job's members agree on.
        device: of the model's tensors.
    """

    def __init__(
        self,
        plan: Plan,
        first_tick: Int64Array | None,
        *,
        rank: int,
        own_server_id: str,
        job: JobDescription,
        device: torch.device,
    ) -> None:
        self.plan = plan
        self._first = job.first_ticks(plan, first_tick)
        self._rank = rank
        self._own_server_id = own_server_id
        self._job = job
        self._device = device
        self._derived: dict[_RouteKey, tuple[ServerRows, ...]] = {}

    def derive_ahead(self, phases: Iterable[Phase]) -> Mapping[Any, list[int]]:
        """Derives what the first ticks of ``phases`` need, so that they do not wait for it.

        Returns:
            By phase, the sizes in bytes of what is held at a time of a tick of each nano-batch; in
            pipelines by slot of the schedule, of the action there.
        """
        order = self._job.order
        if not self._layers:
            return {}
        by_phase: defaultdict[Phase, list[int]] = defaultdict(list)
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for phase in phases:
            for nano_batch in range(self._job.n_nano_batches):
                first = self._first_tick(phase, nano_batch)
                sizes = self._sizes(first)
                by_phase[phase] += sizes
                for slot in self._slots(first):
                    by_slot[slot] += sizes
        return by_phase if order is None else by_slot

    def _slots(self, first: Tick) -> set[int]:
        """Of all stages of this rank, in which it comes to the ticks of the lane and phase of
        ``first``; none without pipelines."""
        order = self._job.order
        if order is None:
            return set()
        ticks = (replace(first, layer=layer) for layer in self._layers)
        return {slot for tick in ticks for slot in order.slots(self._rank, tick)}

    def _first_tick(self, phase: Phase, nano_batch: int) -> Tick:
        layer = self._layers[0 if phase is Phase.FORWARD else -1]
        return Tick(self.plan.manifest.step, layer, nano_batch, phase)

    @property
    def _layers(self) -> range:
        """Of the job's layers, those that this rank has."""
        pipelining, n_layers = self._job.pipelining, self._job.n_layers
        own = n_layers if pipelining is None else pipelining.layers_of(self._rank)
        return range(n_layers - own, n_layers)

    def _sizes(self, tick: Tick) -> list[int]:
        """Of the messages of a tick of this rank that are held at a time: a reply is received when
        its request has gone."""
        _, servers = self.of(tick)
        return [
            max(rows.request.nbytes, rows.reply.nbytes)
            for rows in servers
            if rows.server_id != self._own_server_id
        ]

    def of(self, tick: Tick) -> tuple[_RouteKey, tuple[ServerRows, ...]]:
        """The routes of ``tick``, by server in the plan's order, and what they are kept under."""
        stretch = self._first.stretch(tick.nano_batch, tick.lane_index(self._job.n_layers))
        key = (tick.nano_batch, tick.phase, stretch)
        if key not in self._derived:
            self._derived[key] = () if stretch < 0 else self._derive(*key)
        return key, self._derived[key]

    def _derive(self, nano_batch: int, phase: Phase, stretch: int) -> tuple[ServerRows, ...]:
        plan, shape = self.plan, self._job.shape
        documents = self._first.documents(nano_batch, stretch)
        routes = derive_routes(plan.manifest, plan.tasks(phase), nano_batch, documents)
        return tuple(
            self._rows_of(
                plan.servers[index].server_id,
                route,
                request_layout(route, shape, phase),
                reply_layout(route, shape, phase),
            )
            for (rank, index), route in routes.items()
            if rank == self._rank
        )

    def _rows_of(
        self, server_id: str, route: PairRoute, request: MessageLayout, reply: MessageLayout
    ) -> ServerRows:
        q_rows, kv_rows = self._upload(route.q_rows), self._upload(route.kv_rows)
        return ServerRows(
            server_id=server_id,
            route=route,
            request=request,
            reply=reply,
            kv_rows=kv_rows,
            rows=message_rows(request, reply, q_rows, kv_rows),
        )

    def _upload(self, rows: Int64Array) -> torch.Tensor:
        return on_device(torch.from_numpy(rows), self._device)


class PlanInForce:
    """A plan of a step with the connections to its servers.

    Args:
        routes: of this rank.
        connections: by server id, to all servers of the plan that are other processes.
    """

    def __init__(self, routes: Routes, connections: Mapping[str, Connection]) -> None:
        self.plan = routes.plan
        self._routes = routes
        self._connections = connections
        self._exchanges: dict[_RouteKey, tuple[Exchange, ...]] = {}

    @property
    def epoch(self) -> int:
        return self.plan.epoch

    def exchanges(self, tick: Tick) -> tuple[Exchange, ...]:
        """The exchanges of ``tick``, by server in the plan's order."""
        key, servers = self._routes.of(tick)
        if key not in self._exchanges:
            self._exchanges[key] = tuple(
                Exchange(
                    plan=self.plan,
                    server_id=rows.server_id,
                    connection=self._connections.get(rows.server_id),
                    route=rows.route,
                    request=rows.request,
                    reply=rows.reply,
                    kv_rows=rows.kv_rows,
                    rows=rows.rows,
                )
                for rows in servers
            )
        return self._exchanges[key]


_RouteKey = tuple[int, Phase, int]
"""Nano-batch, phase and stretch (see ``FirstTicks``)."""
