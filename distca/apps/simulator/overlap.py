"""Ways to hide messages behind compute, and how long a stack of layers takes in each.

With two nano-batches that take turns, see :mod:`distca.apps.simulator.ping_pong`. With one, a layer
is a linear part L, a rank's own tasks, and others' A::

    own tasks first   compute   L  own own own A      next L waits for O
                      links       Q Q           O O
    remote first      compute   L  own A own own
                      links       Q Q   O O
    two head groups   compute   L  own A0 own A1
                      links       Q0 Q1 O0    O1
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.disaggregated import Method, SlotWork, plan_lengths, tick_time
from distca.apps.simulator.ping_pong import PortTransfer, deliver
from distca.apps.simulator.setup import Setup

PIECE_SECONDS = 5e-3
"""The length of a call of own tasks: so long others' may have to wait for its end."""

HEAD_GROUPS = (1, 2, 4, 8)

PAYS = 0.01
"""Share of a step that more groups must save: copies into groups and back, which the model leaves
out, cost as much with 8B models on an H200."""


@dataclass(frozen=True, kw_only=True)
class Hiding:
    """A way in which one nano-batch hides its messages.

    Attributes:
        head_groups: ticks of a layer, each with one in so many heads.
        remote_first: servers compute other ranks' tasks before their own rank's.
    """

    head_groups: int = 1
    remote_first: bool = True

    def __str__(self) -> str:
        order = "remote first" if self.remote_first else "own tasks first"
        return f"one lane, {order}, head_groups {self.head_groups}"


PING_PONG = "two lanes (ping-pong)"


def exposed_shares(
    setup: Setup, batches: Sequence[Int64Array], method: Method
) -> dict[Hiding | str, float]:
    """The share of steps that waits for messages, in every way that the model's heads allow;
    without pipeline stages."""
    heads = setup.model.num_heads_kv // setup.cluster.tensor_parallel
    ways = [
        Hiding(head_groups=n_groups, remote_first=remote_first)
        for remote_first in (False, True)
        for n_groups in HEAD_GROUPS
        if heads % n_groups == 0
    ]
    methods = (replace(method, n_nano_batches=n_nano_batches) for n_nano_batches in (1, 2))
    one, two = ([plan_lengths(setup, batch, each)[1] for batch in batches] for each in methods)
    shares: dict[Hiding | str, float] = {way: _share(setup, one, way) for way in ways}
    ticks = [
        tick_time(setup, works, setup.layers_per_stage) for step in two for works in step.values()
    ]
    shares[PING_PONG] = sum(t.exposed_seconds for t in ticks) / sum(t.seconds for t in ticks)
    return shares


def head_groups_that_pay(shares: Mapping[Hiding | str, float]) -> int:
    """The fewest groups beyond which no more pay."""
    ways = {way: share for way, share in shares.items() if isinstance(way, Hiding)}
    least = min(share for way, share in ways.items() if way.remote_first)
    return min(
        way.head_groups for way, share in ways.items() if way.remote_first and share < least + PAYS
    )


def lane_seconds(work: SlotWork, n_layers: int, way: Hiding, cluster: ClusterSpec) -> float:
    """Seconds of ``n_layers`` equal layers of one nano-batch, from the first linear part to the
    last reply, over the links of ``cluster``."""
    group = work.divided(way.head_groups)
    request, reply = (PortTransfer.of(each, cluster) for each in (group.request, group.reply))
    others = group.attention_seconds - group.own_seconds
    size = len(others)
    compute, out_free, in_free, arrived = np.zeros((4, size))
    for _ in range(n_layers):
        compute = np.maximum(compute, arrived) + work.linear_seconds
        asked = [deliver(request, compute, out_free, in_free) for _ in range(way.head_groups)]
        now, own = compute, work.own_seconds
        if not way.remote_first:
            now, own = now + own, np.zeros(size)
        replies = []
        for begin in asked:
            pieces = np.ceil(np.maximum(begin - now, 0) / PIECE_SECONDS)
            used = np.minimum(own, np.where(others > 0, pieces * PIECE_SECONDS, 0))
            now = np.where(others > 0, np.maximum(now + used, begin) + others, now)
            own = own - used
            replies.append(now)
        compute = now + own
        arrived = np.max([deliver(reply, done, out_free, in_free) for done in replies], axis=0)
    return float(max(compute.max(), in_free.max()))


def _share(setup: Setup, steps: Sequence[dict[Phase, list[SlotWork]]], way: Hiding) -> float:
    n_layers, cluster = setup.layers_per_stage, setup.cluster
    instant = replace(
        cluster,
        gpu_bandwidth_bytes_per_second=1e30,
        host_bandwidth_bytes_per_second=1e30,
        message_latency_seconds=0.0,
    )
    seconds = least = 0.0
    for step in steps:
        for (work,) in step.values():
            seconds += lane_seconds(work, n_layers, way, cluster)
            least += lane_seconds(work, n_layers, way, instant)
    return 1 - least / seconds
