"""Routes: the rows that travel between a rank and a server, derived from the plan, never sent.

Both sides compute them with this function, so one message for each pair of them is enough, and it
needs no header. Server s needs of rank r, among the rows whose home is r,

    queries(r, s) = union of [q_begin, q_end) over the tasks of s
    keys(r, s)    = union of [0, q_end), each row once, however many tasks read it

and gives back O by query; in the backward pass dQ by query, and dK and dV by key, which home sums
over servers in the order of their numbers. Equal plans therefore give equal bits.
"""

import math
from typing import NamedTuple

import torch

from examples.nano_distca.documents import NanoBatch
from examples.nano_distca.plan import Plan
from examples.nano_distca.tasks import Shape

Rows = dict[str, torch.Tensor]
"""Tensors of a nano-batch by name, ``[tokens, ...]``: where a row is away, it holds zeros."""


Names = tuple[tuple[str, ...], tuple[str, ...]]
"""The tensors of which a message has rows: by query, then by key."""


class Phase(NamedTuple):
    """What a request asks with, and what the reply gives. A server keeps nothing in between."""

    request: Names
    reply: Names


FORWARD = Phase((("q",), ("k", "v")), (("o", "lse"), ()))
BACKWARD = Phase((("q", "do", "lse", "delta"), ("k", "v")), (("dq",), ("dk", "dv")))


class Route(NamedTuple):
    """Row numbers, ascending."""

    queries: torch.Tensor
    keys: torch.Tensor


def derive_routes(batch: NanoBatch, plan: Plan) -> dict[tuple[int, int], Route]:
    """By (rank, server), for the pairs that have anything to say to each other."""
    routes = {}
    for server, own in enumerate(plan.tasks):
        queries, keys = torch.zeros(2, batch.tokens, dtype=torch.bool)
        for task in own:
            first = batch.first[task.document]
            queries[first + task.q_begin : first + task.q_end] = True
            keys[first : first + task.q_end] = True
        for rank in range(batch.n_ranks):
            home = batch.rows(rank)
            route = Route(*(each[home].nonzero()[:, 0] + home.start for each in (queries, keys)))
            if len(route.keys) or len(route.queries):
                routes[rank, server] = route
    return routes


def row_shape(name: str, shape: Shape) -> tuple[int, ...]:
    """Of one row of the tensor of this name."""
    if name in ("lse", "delta"):
        return (shape.heads,)
    return (shape.heads_kv if name in ("k", "v", "dk", "dv") else shape.heads, shape.head_dim)


def empty_rows(names: Names, tokens: int, shape: Shape, dtype: torch.dtype) -> Rows:
    """Zeros for all rows of a nano-batch."""
    return {n: torch.zeros(tokens, *row_shape(n, shape), dtype=dtype) for n in sum(names, ())}


def numbers(route: Route, names: Names, shape: Shape) -> int:
    """How many numbers a message has."""
    each = [
        math.prod((len(r), *row_shape(n, shape)))
        for r, ns in zip(route, names, strict=True)
        for n in ns
    ]
    return sum(each)


def pack(rows: Rows, route: Route, names: Names) -> torch.Tensor:
    """The message of a route, flat."""
    parts = zip(route, names, strict=True)
    return torch.cat([rows[name][chosen].flatten() for chosen, each in parts for name in each])


def add(message: torch.Tensor, route: Route, names: Names, rows: Rows) -> None:
    """Adds a message's rows to ``rows``, in place."""
    for chosen, each in zip(route, names, strict=True):
        for name in each:
            like = rows[name][chosen]
            part, message = message.tensor_split([like.numel()])
            rows[name][chosen] = like + part.view_as(like)


def moved_bytes(batch: NanoBatch, plan: Plan, shape: Shape, phase: Phase) -> int:
    """What travels in a tick, requests and replies; rows that stay at home do not."""
    return shape.element_bytes * sum(
        numbers(route, names, shape)
        for (rank, server), route in derive_routes(batch, plan).items()
        for names in phase
        if rank != server
    )
