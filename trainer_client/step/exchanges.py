"""The rows that a rank exchanges with each server under a plan of a step."""

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


@dataclass(eq=False)
class ServerExchange:
    """The rows that this rank exchanges with one server in some ticks of a (nano-batch, phase).

    Attributes:
        plan: this rank's slice of the plan.
        server_id: the server.
        route: which rows.
        request, reply: message layouts.
        kv_rows: int64 packed rows of keys on the device, in message order.
        rows: puts rows into requests and takes them out of replies.
        connection: to the server, once the plan is in force; None if it is this process's own.
    """

    plan: Plan
    server_id: str
    route: PairRoute
    request: MessageLayout
    reply: MessageLayout
    kv_rows: torch.Tensor
    rows: MessageRows
    connection: Connection | None = None


class Routes:
    """This rank's exchanges under a plan: derived when first asked for, or ahead, and then kept.
    Thread-safe once connected: two threads may derive the same, which is then equal.

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
        self._connections: Mapping[str, Connection] = {}
        self._derived: dict[tuple[int, Phase, int], tuple[ServerExchange, ...]] = {}

    def connect(self, connections: Mapping[str, Connection]) -> None:
        """The plan is in force: there are connections, by server id, to all of its servers that are
        other processes."""
        self._connections = connections
        for exchanges in self._derived.values():
            for exchange in exchanges:
                exchange.connection = connections.get(exchange.server_id)

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
        """The slots, of all stages of this rank, in which it comes to the ticks of the lane and
        phase of ``first``; none without pipelines."""
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
        """The layers of the job that this rank has."""
        pipelining, n_layers = self._job.pipelining, self._job.n_layers
        own = n_layers if pipelining is None else pipelining.layers_of(self._rank)
        return range(n_layers - own, n_layers)

    def _sizes(self, tick: Tick) -> list[int]:
        """The sizes of the messages of a call of this rank that are held at a time: a reply is
        received when its request has gone."""
        return self._job.head_groups * [
            max(exchange.request.nbytes, exchange.reply.nbytes)
            for exchange in self.of(tick)
            if exchange.server_id != self._own_server_id
        ]

    def of(self, tick: Tick) -> tuple[ServerExchange, ...]:
        """The exchanges of ``tick``, in the order in which this rank sends them: every rank begins
        with another server, and its own one comes last. If all began with the first, its network
        would be crowded while the others' lie idle."""
        stretch = self._first.stretch(tick.nano_batch, tick.lane_index(self._job.n_layers))
        key = (tick.nano_batch, tick.phase, stretch)
        if key not in self._derived:
            self._derived[key] = () if stretch < 0 else self._derive(*key)
        return self._derived[key]

    def _derive(self, nano_batch: int, phase: Phase, stretch: int) -> tuple[ServerExchange, ...]:
        plan, n_servers = self.plan, len(self.plan.servers)
        documents = self._first.documents(nano_batch, stretch)
        routes = derive_routes(plan.manifest, plan.tasks(phase), nano_batch, documents)
        mine = [route for (rank, _), route in routes.items() if rank == self._rank]
        mine.sort(key=lambda route: (route.server - self._rank - 1) % n_servers)
        return tuple(self._exchange(route, phase) for route in mine)

    def _exchange(self, route: PairRoute, phase: Phase) -> ServerExchange:
        server_id = self.plan.servers[route.server].server_id
        request = request_layout(route, self._job.shape, phase)
        reply = reply_layout(route, self._job.shape, phase)
        q_rows, kv_rows = self._upload(route.q_rows), self._upload(route.kv_rows)
        return ServerExchange(
            plan=self.plan,
            server_id=server_id,
            route=route,
            request=request,
            reply=reply,
            kv_rows=kv_rows,
            rows=message_rows(request, reply, q_rows, kv_rows),
            connection=self._connections.get(server_id),
        )

    def _upload(self, rows: Int64Array) -> torch.Tensor:
        return on_device(torch.from_numpy(rows), self._device)
