"""Traffic of a plan: the messages between endpoints in each exchange, and the seconds they take.

Endpoints are the ranks, in order, and after them the pool servers in the order of the plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.message import reply_layout, request_layout
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from distca.apps.simulator.cluster import ClusterSpec


@dataclass(frozen=True, eq=False)
class Messages:
    """The messages that travel at the same time, in one direction of one tick and one layer.

    Attributes:
        n_endpoints: endpoints that there are.
        source, destination: ``[n_messages]`` endpoints, never equal.
        nbytes: ``[n_messages]`` above 0.
    """

    n_endpoints: int
    source: Int64Array
    destination: Int64Array
    nbytes: Int64Array

    @classmethod
    def none(cls, n_endpoints: int) -> Messages:
        """No messages."""
        return _messages([], n_endpoints)

    @property
    def total_bytes(self) -> int:
        return int(self.nbytes.sum())

    def divided(self, parts: int) -> Messages:
        """The same messages with one of so many equal parts of their bytes, rounded up."""
        return replace(self, nbytes=-(-self.nbytes // parts))

    def matrix(self) -> Int64Array:
        """``[n_endpoints, n_endpoints]`` bytes from row to column."""
        dense = np.zeros((self.n_endpoints, self.n_endpoints), dtype=np.int64)
        np.add.at(dense, (self.source, self.destination), self.nbytes)
        return dense


@dataclass(frozen=True, eq=False)
class TickMessages:
    """The messages of one tick, in one layer: homes to servers, and back."""

    request: Messages
    reply: Messages

    @property
    def total_bytes(self) -> int:
        return self.request.total_bytes + self.reply.total_bytes


def server_endpoints(plan: Plan) -> Int64Array:
    """``[n_servers]`` endpoint of each server: its own rank's, or one of its own in the pool."""
    in_pool = np.array([server.in_place_rank is None for server in plan.servers])
    ranks = np.array([server.in_place_rank or 0 for server in plan.servers], dtype=np.int64)
    return np.where(in_pool, plan.manifest.n_ranks + np.cumsum(in_pool) - 1, ranks)


def count_endpoints(plan: Plan) -> int:
    """Ranks and pool servers together."""
    in_pool = sum(server.in_place_rank is None for server in plan.servers)
    return plan.manifest.n_ranks + in_pool


def exchange(plan: Plan, shape: AttentionShape, phase: Phase, nano_batch: int) -> TickMessages:
    """The messages that trainers and servers would exchange, from the routes that they derive.

    What stays on its home is no message.
    """
    endpoint = server_endpoints(plan)
    requests, replies = [], []
    routes = derive_routes(plan.manifest, plan.tasks(phase), nano_batch)
    for (rank, server), route in routes.items():
        there = int(endpoint[server])
        if there != rank:
            requests.append((rank, there, request_layout(route, shape, phase).nbytes))
            replies.append((there, rank, reply_layout(route, shape, phase).nbytes))
    size = count_endpoints(plan)
    return TickMessages(_messages(requests, size), _messages(replies, size))


def _messages(rows: list[tuple[int, int, int]], n_endpoints: int) -> Messages:
    table = np.array([row for row in rows if row[2]], dtype=np.int64).reshape(-1, 3)
    return Messages(n_endpoints, *table.T)


def join(some: Messages, others: Messages) -> Messages:
    """All messages of both, which travel at the same time between the same endpoints."""
    columns = (
        np.concatenate([getattr(some, name), getattr(others, name)])
        for name in ("source", "destination", "nbytes")
    )
    return Messages(some.n_endpoints, *columns)


def message_seconds(messages: Messages, cluster: ClusterSpec) -> Float64Array:
    """``[n_messages]`` seconds that each takes alone: its bytes over its link, and its latency."""
    near = _near(messages, cluster)
    rate = np.where(
        near,
        cluster.rank_host_bandwidth_bytes_per_second,
        cluster.rank_bandwidth_bytes_per_second,
    )
    return np.asarray(messages.nbytes / rate + cluster.message_latency_seconds)


def port_seconds(messages: Messages, cluster: ClusterSpec) -> Float64Array:
    """``[n_endpoints, 2]`` seconds that each endpoint's sending and receiving side is busy.

    Messages within a host and across hosts use different links at the same time, so the slower
    kind counts; every message adds its latency.
    """
    near = _near(messages, cluster)
    seconds = message_seconds(messages, cluster)
    sides = []
    for end in (messages.source, messages.destination):
        kinds = [
            np.bincount(end[on], weights=seconds[on], minlength=messages.n_endpoints)
            for on in (near, ~near)
        ]
        sides.append(np.maximum(*kinds))
    return np.stack(sides, axis=1)


def _near(messages: Messages, cluster: ClusterSpec) -> NDArray[np.bool_]:
    """``[n_messages]`` whether both ends are on one host."""
    return np.asarray(
        messages.source // cluster.ranks_per_host == messages.destination // cluster.ranks_per_host
    )
