"""The same step as the closed forms, event by event: every GPU, port and message on its own.

The closed forms take each part of a layer to last as long as on the slowest rank and each exchange
as long as its busiest port. Here ranks run ahead of one another, messages wait for both of their
ports, and a part starts when its own inputs are there. Small cases only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array
from core_attention.schedule import Kind, Schedule
from distca.simulator.cluster import ClusterSpec
from distca.simulator.traffic import Exchange, Messages, message_seconds, port_seconds
from tests.simulator.event_engine import Job, run

CHUNK_SECONDS = 2e-4
"""Messages are cut into pieces of this many seconds, so that several peers share a port fairly."""


@dataclass(frozen=True, eq=False)
class RankTimes:
    """One nano-batch in one layer and phase, rank by rank.

    Attributes:
        linear_seconds: ``[n_endpoints]``; 0 on pool servers and idle stages.
        attention_seconds: ``[n_endpoints]``.
        messages: what travels.
    """

    linear_seconds: Float64Array
    attention_seconds: Float64Array
    messages: Exchange


class _Graph:
    """Jobs under construction."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.jobs: list[Job] = []
        self._cluster = cluster

    def compute(self, endpoint: int, seconds: float, after: list[int], order: int) -> int:
        """Adds a job to a GPU, which runs whatever is ready, the smallest ``order`` first."""
        self.jobs.append(Job(seconds, (f"gpu {endpoint}",), tuple(after), (float(order),)))
        return len(self.jobs) - 1

    def transfer(
        self, messages: Messages, after: dict[int, int], order: int
    ) -> dict[int, list[int]]:
        """Adds messages, each after the job of its source; returns the jobs by destination.

        Of messages that wait, those of earlier exchanges go first, then those between the busiest
        ports.
        """
        load = port_seconds(messages, self._cluster)
        near = messages.source // self._cluster.ranks_per_host == (
            messages.destination // self._cluster.ranks_per_host
        )
        arriving: dict[int, list[int]] = {}
        for source, destination, seconds, is_near in zip(
            messages.source.tolist(),
            messages.destination.tolist(),
            message_seconds(messages, self._cluster).tolist(),
            near.tolist(),
            strict=True,
        ):
            kind = "near" if is_near else "far"
            n_chunks = max(1, round(seconds / CHUNK_SECONDS))
            busiest = load[source, 0] + load[destination, 1]
            before = after[source]
            for chunk in range(n_chunks):
                left = busiest * (n_chunks - chunk) / n_chunks
                ports = (f"{kind} out {source}", f"{kind} in {destination}")
                self.jobs.append(Job(seconds / n_chunks, ports, (before,), (float(order), -left)))
                arriving.setdefault(destination, []).append(len(self.jobs) - 1)
        return arriving


def stack_seconds_by_events(
    nano_batches: tuple[RankTimes, ...], n_layers: int, cluster: ClusterSpec
) -> float:
    """Seconds of ``n_layers`` equal layers, by events;
    :func:`distca.simulator.ping_pong.stack_seconds` has the closed form."""
    graph = _Graph(cluster)
    size = len(nano_batches[0].linear_seconds)
    # What each rank's next linear part of a nano-batch waits for.
    inputs: list[dict[int, list[int]]] = [{} for _ in nano_batches]
    order = 0
    for _ in range(n_layers):
        linear: list[dict[int, int]] = []
        requested: list[dict[int, list[int]]] = []
        for k, times in enumerate(nano_batches):
            linear.append(
                {
                    rank: graph.compute(
                        rank, float(times.linear_seconds[rank]), inputs[k].get(rank, []), order
                    )
                    for rank in range(size)
                }
            )
            requested.append(graph.transfer(times.messages.request, linear[k], order))
            order += 1
        for k, times in enumerate(nano_batches):
            attention = {
                server: graph.compute(
                    server,
                    float(times.attention_seconds[server]),
                    [*requested[k].get(server, []), linear[k][server]],
                    order,
                )
                for server in range(size)
            }
            replies = graph.transfer(times.messages.reply, attention, order)
            inputs[k] = {rank: [*replies.get(rank, []), attention[rank]] for rank in range(size)}
            order += 1
    return max(run(graph.jobs), default=0.0)


def schedule_seconds_by_events(
    schedule: Schedule, seconds: Mapping[Kind, Float64Array]
) -> Float64Array:
    """As :func:`distca.simulator.pipeline.schedule_seconds`, one GPU a rank, by events."""
    n_pipelines = next(iter(seconds.values())).shape[1]
    return np.array([_one_pipeline(schedule, seconds, d) for d in range(n_pipelines)])


def _one_pipeline(schedule: Schedule, seconds: Mapping[Kind, Float64Array], pipeline: int) -> float:
    actions = [action for rank in range(schedule.n_ranks) for action in schedule.order(rank)]
    index = {action: at for at, action in enumerate(actions)}
    jobs = []
    for at, action in enumerate(actions):
        rank = schedule.rank_of_stage[action.stage]
        after = [index[needed] for needed in schedule.needs(action)]
        if action != schedule.order(rank)[0]:
            after.append(at - 1)
        took = float(seconds[action.kind][action.microbatch, pipeline])
        jobs.append(Job(took, (f"rank {rank}",), tuple(after)))
    return max(run(jobs))
