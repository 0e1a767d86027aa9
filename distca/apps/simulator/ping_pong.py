"""Ping-pong: how long a stack of layers takes when two nano-batches take turns.

On every GPU a layer runs two linear parts and two attention parts; beside it the links carry
requests and replies. A GPU runs what is ready, and steadily that is one of two orders::

    in turn     compute   L0  L1  A0  A1  L0' L1' ...     A_k  waits for Q_k, which follows L_k
                links         Q0  Q1  O0  O1  Q0' ...     L_k' waits for O_k, which follows A_k

    staggered   compute   A0  L0' A1  L1' A0' ...
                links         O0  Q0' O1  Q1' ...

In turn, Q0 hides behind L1, Q1 behind A0, O0 behind A1 and O1 behind the next L0 (paper, section
4.3). Staggered, a request has an attention and a linear part to hide behind, and replies have
nothing: better where attention is short and requests are long. The faster one counts. Where all
ranks are alike and nothing is exposed a layer takes ``L0 + L1 + A0 + A1``; where the links bound
it, ``Q0 + Q1 + O0 + O1``. In general the seconds are those of the longest path through the graph,
with one copy of it per rank, tied together by the messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.traffic import Messages, port_seconds

LINEAR, ATTENTION = "linear", "attention"


@dataclass(frozen=True, eq=False)
class PortTransfer:
    """The messages of one direction of an exchange, as seconds of ports.

    Attributes:
        source, destination: ``[n_messages]`` endpoints.
        out_seconds, in_seconds: ``[n_endpoints]`` for which each sends and receives.
    """

    source: Int64Array
    destination: Int64Array
    out_seconds: Float64Array
    in_seconds: Float64Array

    @classmethod
    def of(cls, messages: Messages, cluster: ClusterSpec) -> PortTransfer:
        """The transfer of ``messages`` over the links of ``cluster``."""
        ports = port_seconds(messages, cluster)
        return cls(messages.source, messages.destination, ports[:, 0], ports[:, 1])

    @property
    def seconds(self) -> float:
        """Until all has arrived, if all is ready at once: the busiest port, which a good order
        attains when messages may be interleaved (open shop with preemption)."""
        return float(max(self.out_seconds.max(initial=0.0), self.in_seconds.max(initial=0.0)))


@dataclass(frozen=True, eq=False)
class NanoBatchTimes:
    """One nano-batch in one layer and phase, endpoint by endpoint.

    Attributes:
        linear_seconds: ``[n_endpoints]`` everything but core attention; 0 on pool servers.
        request: Q, K and V (backward: dO and more) travel to the servers.
        attention_seconds: ``[n_endpoints]`` core attention.
        reply: O (backward: dQ, dK and dV) travel back.
    """

    linear_seconds: Float64Array
    request: PortTransfer
    attention_seconds: Float64Array
    reply: PortTransfer


def stack_seconds(nano_batches: tuple[NanoBatchTimes, ...], n_layers: int) -> float:
    """Seconds of ``n_layers`` equal layers, from the first linear part to the last reply.

    Args:
        nano_batches: one (nothing overlaps) or two (ping-pong), in the order of their turns.
        n_layers: 0 or more.
    """
    if len(nano_batches) not in (1, 2):
        raise ValueError(f"{len(nano_batches)} nano-batches; ping-pong has 1 or 2")
    in_turn = [step for _ in range(n_layers) for step in _one_layer(len(nano_batches))]
    seconds = _longest_path(nano_batches, in_turn)
    if len(nano_batches) == 2:
        seconds = min(seconds, _longest_path(nano_batches, _staggered(n_layers)))
    return seconds


def _one_layer(n_nano_batches: int) -> list[tuple[str, int]]:
    return [(part, k) for part in (LINEAR, ATTENTION) for k in range(n_nano_batches)]


def _staggered(n_layers: int) -> list[tuple[str, int]]:
    """Each nano-batch's next linear part right after its attention."""
    if n_layers == 0:
        return []
    turn = [(ATTENTION, 0), (LINEAR, 0), (ATTENTION, 1), (LINEAR, 1)]
    return [(LINEAR, 0), (LINEAR, 1), *(turn * (n_layers - 1)), (ATTENTION, 0), (ATTENTION, 1)]


def _longest_path(nano_batches: tuple[NanoBatchTimes, ...], order: list[tuple[str, int]]) -> float:
    """Seconds if every GPU runs its parts in ``order``."""
    size = len(nano_batches[0].linear_seconds)
    compute, out_free, in_free = np.zeros(size), np.zeros(size), np.zeros(size)
    arrived = [np.zeros(size) for _ in nano_batches]
    for part, k in order:
        times = nano_batches[k]
        seconds, transfer = (
            (times.linear_seconds, times.request)
            if part == LINEAR
            else (times.attention_seconds, times.reply)
        )
        compute = np.maximum(compute, arrived[k]) + seconds
        arrived[k] = deliver(transfer, compute, out_free, in_free)
    return float(max(compute.max(), in_free.max()))


def exposed_seconds(nano_batches: tuple[NanoBatchTimes, ...], n_layers: int) -> float:
    """Seconds that communication adds: :func:`stack_seconds` less the same over infinitely fast
    links, where ranks still wait for one another's messages."""
    instant = tuple(
        replace(times, request=_instant(times.request), reply=_instant(times.reply))
        for times in nano_batches
    )
    return stack_seconds(nano_batches, n_layers) - stack_seconds(instant, n_layers)


def _instant(transfer: PortTransfer) -> PortTransfer:
    nothing = np.zeros_like(transfer.out_seconds)
    return replace(transfer, out_seconds=nothing, in_seconds=nothing)


def deliver(
    transfer: PortTransfer, ready: Float64Array, out_free: Float64Array, in_free: Float64Array
) -> Float64Array:
    """Sends what is ``ready`` at its sources; moves ``out_free`` and ``in_free`` on.

    A source sends once it is ready and its port free. A destination receives from the time its
    first source is ready, and not less than its port needs; it has everything when the last of its
    sources has finished sending.

    Returns:
        ``[n_endpoints]`` when each has all that is sent to it; 0 where nothing is.
    """
    source, destination = transfer.source, transfer.destination
    out_free[source] = (np.maximum(out_free, ready) + transfer.out_seconds)[source]
    first = np.full(len(ready), np.inf)
    np.minimum.at(first, destination, ready[source])
    last = np.zeros(len(ready))
    np.maximum.at(last, destination, out_free[source])
    in_free[destination] = np.maximum(np.maximum(in_free, first) + transfer.in_seconds, last)[
        destination
    ]
    arrived = np.zeros(len(ready))
    arrived[destination] = in_free[destination]
    return arrived
