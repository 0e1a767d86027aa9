"""The same step as the closed forms, event by event: every GPU, port and message on its own.

The closed forms take each part of a layer to last as long as on the slowest rank and each exchange
as long as its busiest port. Here ranks run ahead of one another, messages wait for both of their
ports, and a part starts when its own inputs are there. Small cases only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.plan import Plan
from core_attention.schedule import Action, Kind, Schedule, side_by_side
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.disaggregated import Method, disaggregated_step, kind_slots
from distca.apps.simulator.setup import Setup, stage_layers
from distca.apps.simulator.traffic import Messages, exchange, message_seconds, port_seconds
from tests.unit.simulator.event_engine import Job, run

CHUNK_SECONDS = 2e-4
"""Messages are cut into pieces of this many seconds, so that several peers share a port fairly."""


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


def schedule_seconds_by_events(
    schedule: Schedule, seconds: Mapping[Kind, Float64Array]
) -> Float64Array:
    """As :func:`distca.apps.simulator.pipeline.schedule_seconds`, one GPU a rank, by events."""
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


def pooled_step_seconds_by_events(setup: Setup, lengths: Int64Array, method: Method) -> float:
    """As :func:`~distca.apps.simulator.disaggregated.disaggregated_step` for one pipeline, without
    slots: they say what plans count with, and what goes first where two things could run."""
    plans: list[Plan] = []

    def planner(*args: Any, **kwargs: Any) -> Plan:
        plans.append(method.planner(*args, **kwargs))
        return plans[-1]

    disaggregated_step(setup, lengths, replace(method, planner=planner))
    schedule = method.schedule(setup.n_stages, setup.n_microbatches)
    n_slots = kind_slots(setup, schedule)
    graph = _PooledGraph(setup, schedule, method.n_nano_batches)
    left = iter(plans)
    for at, slot in enumerate(side_by_side(schedule, n_slots)):
        planned = {
            phase: next(left)
            for phase in (Phase.BACKWARD, Phase.FORWARD)
            if any(action and action.kind.attention_phase is phase for action in slot)
        }
        for rank, action in enumerate(slot):
            if action is not None:
                phase = action.kind.attention_phase
                graph.add(at, rank, action, planned[phase] if phase else None, n_slots[action.kind])
    return max(run(graph.jobs))


class _PooledGraph(_Graph):
    """The jobs of a step of one pipeline."""

    def __init__(self, setup: Setup, schedule: Schedule, n_nano_batches: int) -> None:
        super().__init__(setup.cluster)
        self._setup, self._schedule = setup, schedule
        self._n_nano_batches = n_nano_batches
        self._n_layers = stage_layers(setup, schedule)
        self._ends: dict[Action, list[int]] = {}
        self._last: dict[int, list[int]] = {}

    def add(self, slot: int, rank: int, action: Action, plan: Plan | None, n_slots: int) -> None:
        """The part of ``action`` that runs in ``slot``, one of ``n_slots``."""
        before = list(self._last.get(rank, []))
        for needed in self._schedule.needs(action):
            if action not in self._ends:
                before += self._ends[needed]
        rows = self._setup.tokens_per_rank / self._n_nano_batches
        linear_seconds = rows * self._setup.action_seconds_per_token(action.kind) / n_slots
        ready = [before for _ in range(self._n_nano_batches)]
        for layer in range(self._n_layers):
            # Slots and layers first: what is due earlier goes first.
            order = (slot * self._n_layers + layer) * 2
            linear = [self.compute(rank, linear_seconds, after, order) for after in ready]
            ready = [
                self._attend(rank, action, plan, n_slots, k, job, order + 1)
                for k, job in enumerate(linear)
            ]
        ends = [job for jobs in ready for job in jobs]
        self._ends[action] = self._last[rank] = ends

    def _attend(
        self,
        rank: int,
        action: Action,
        plan: Plan | None,
        n_slots: int,
        nano_batch: int,
        linear: int,
        order: int,
    ) -> list[int]:
        """Core attention of one nano-batch; returns the jobs after which ``rank`` has it all."""
        phase = action.kind.attention_phase
        if plan is None or phase is None:
            return [linear]
        busy = _attention_of(plan, self._setup, phase, nano_batch, rank) / n_slots
        messages = exchange(plan, self._setup.model.attention_shape, phase, nano_batch)
        request = _only(messages.request, messages.request.source == rank).divided(n_slots)
        reply = _only(messages.reply, messages.reply.destination == rank).divided(n_slots)
        requested = self.transfer(request, {rank: linear}, order)
        jobs = {
            server: self.compute(
                server,
                float(seconds),
                [*requested.get(server, []), *([linear] if server == rank else [])],
                order,
            )
            for server, seconds in enumerate(busy)
            if seconds > 0
        }
        replies = self.transfer(reply, jobs, order)
        return [*replies.get(rank, []), *([jobs[rank]] if rank in jobs else []), linear]


def _only(messages: Messages, chosen: NDArray[np.bool_]) -> Messages:
    return Messages(
        messages.n_endpoints,
        messages.source[chosen],
        messages.destination[chosen],
        messages.nbytes[chosen],
    )


def _attention_of(
    plan: Plan, setup: Setup, phase: Phase, nano_batch: int, rank: int
) -> Float64Array:
    """``[n_servers]`` seconds of one layer of the tasks whose queries are at home on ``rank``."""
    tasks, manifest = plan.tasks(phase), plan.manifest
    busy = np.zeros(len(plan.servers))
    for document, begin, end, server in zip(
        tasks.document, tasks.q_begin, tasks.q_end, tasks.server, strict=True
    ):
        first, last = manifest.first_segment[document], manifest.first_segment[document + 1]
        ends = manifest.segment_offset[first:last] + manifest.segment_length[first:last]
        home = manifest.segment_rank[first + int(np.searchsorted(ends, begin, side="right"))]
        if home == rank and manifest.document_nano_batch[document] == nano_batch:
            length = np.array([end - begin]), np.array([end])
            busy[server] += float(setup.rank_profile.seconds(*length, phase)[0])
    return busy
