"""Step time with core attention disaggregation, from real plans.

Every tick is planned by the planner itself; attention seconds then come from the cost profile and
the plan's tasks, bytes from the routes that trainers and servers would derive, so that planners are
judged by one measure and not by their own forecasts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from control_plane.planner.planning import Planner, PlanningOptions
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest
from core_attention.plan import Plan, imbalance
from distca.simulator.errors import InputError, require_not_negative
from distca.simulator.fleet import Placement, build_servers
from distca.simulator.packing import pack_in_order, take_steps
from distca.simulator.ping_pong import NanoBatchTimes, Transfer, exposed_seconds, stack_seconds
from distca.simulator.pipeline import PooledTick, pooled_ticks
from distca.simulator.setup import Setup
from distca.simulator.traffic import count_endpoints, exchange, server_endpoints

Packer = Callable[[Int64Array, int, int, int], Manifest]
"""``(lengths, n_ranks, tokens_per_rank, n_nano_batches) -> Manifest``: plain or planned homes."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """How disaggregation is run.

    Attributes:
        planner: makes the plan of every tick.
        options: its tolerance and cuts.
        pack: gives documents their homes.
        n_nano_batches: 2 with ping-pong, 1 without ("single stream").
        byte_budget: most bytes that a rank may send, or receive, in a tick, in units of what its
            network carries while the forward linear part of a nano-batch runs, behind which a
            request hides; None without limit.
    """

    planner: Planner
    options: PlanningOptions
    pack: Packer = pack_in_order
    n_nano_batches: int = 2
    byte_budget: float | None = None

    def __post_init__(self) -> None:
        if self.n_nano_batches not in (1, 2):
            raise InputError(f"nano_batches is {self.n_nano_batches}; valid are 1 and 2")
        if self.byte_budget is not None:
            require_not_negative("byte_budget", self.byte_budget)


@dataclass(frozen=True)
class DisaggregatedStep:
    """The time of one step with disaggregation.

    Attributes:
        seconds: of the step.
        exposed_seconds: of them, those in which communication was waited for.
        imbalance: worst over ticks, nano-batches and phases of max / mean attention seconds.
        moved_bytes: of all ticks of one layer of every stage.
    """

    seconds: float
    exposed_seconds: float
    imbalance: float
    moved_bytes: int


@dataclass(frozen=True)
class TickTime:
    """Seconds of one stage's layers in one tick, and what they consist of."""

    seconds: float
    exposed_seconds: float
    imbalance: float
    moved_bytes: int


def attention_seconds(
    plan: Plan, profile: CostProfile, phase: Phase, nano_batch: int
) -> Float64Array:
    """``[n_servers]`` busy seconds of one layer under the plan's tasks, ``profile`` on each."""
    tasks = plan.tasks(phase)
    chosen = plan.manifest.document_nano_batch[tasks.document] == nano_batch
    begin, end = tasks.q_begin[chosen], tasks.q_end[chosen]
    busy = np.zeros(len(plan.servers))
    np.add.at(busy, tasks.server[chosen], profile.seconds(end - begin, end, phase))
    return busy


def nano_batch_times(
    setup: Setup, plan: Plan, phase: Phase, nano_batch: int
) -> tuple[NanoBatchTimes, int]:
    """The parts of one nano-batch in one layer, and the bytes that it moves."""
    size = count_endpoints(plan)
    linear, attention = np.zeros(size), np.zeros(size)
    tokens = plan.manifest.tokens_per_rank(nano_batch)
    linear[: len(tokens)] = tokens * setup.linear_seconds_per_token(phase)
    attention[server_endpoints(plan)] = attention_seconds(
        plan, setup.rank_profile, phase, nano_batch
    )
    messages = exchange(plan, setup.model.attention_shape, phase, nano_batch)
    times = NanoBatchTimes(
        linear,
        Transfer.of(messages.request, setup.cluster),
        attention,
        Transfer.of(messages.reply, setup.cluster),
    )
    return times, messages.total_bytes


def tick_time(setup: Setup, plan: Plan, phase: Phase) -> TickTime:
    """One tick of all ranks: the layers of one stage in one phase."""
    nano_batches = range(plan.manifest.n_nano_batches)
    parts = [nano_batch_times(setup, plan, phase, k) for k in nano_batches]
    times = tuple(part[0] for part in parts)
    servers = server_endpoints(plan)
    return TickTime(
        stack_seconds(times, setup.layers_per_stage),
        exposed_seconds(times, setup.layers_per_stage),
        max(imbalance(own.attention_seconds[servers]) for own in times),
        sum(part[1] for part in parts),
    )


def disaggregated_step(
    setup: Setup,
    lengths: Int64Array,
    method: Method,
    placement: Placement = Placement.IN_PLACE,
    n_pool_servers: int = 0,
) -> DisaggregatedStep:
    """The step of all pipelines and microbatches, every tick pooled over all ranks.

    Args:
        setup: what is simulated.
        lengths: documents of the step, ``setup.step_tokens`` tokens.
        method: planner, homes and nano-batches.
        placement: where servers run; pool servers come on top of the setup's ranks.
        n_pool_servers: of a pool.
    """
    servers = build_servers(setup.cluster, setup.rank_profile, placement, n_pool_servers)
    shape = setup.model.attention_shape
    manifests = _microbatches(setup, lengths, method)
    options = planning_options(setup, method)
    times: list[TickTime] = []
    for tick in pooled_ticks(setup.n_stages, setup.n_microbatches):
        manifest = tick_manifest(manifests, tick, setup.n_pipelines)
        plan = method.planner(manifest, servers, shape, options)
        times += [tick_time(setup, plan, phase) for phase in Phase]
    return DisaggregatedStep(
        sum(time.seconds for time in times) + setup.gradient_sync_seconds,
        sum(time.exposed_seconds for time in times),
        max(time.imbalance for time in times),
        sum(time.moved_bytes for time in times),
    )


def planning_options(setup: Setup, method: Method) -> PlanningOptions:
    """The method's options, with the links and hosts of the setup's cluster and its byte budget."""
    cluster = setup.cluster
    network = cluster.rank_bandwidth_bytes_per_second
    limit = None
    if method.byte_budget is not None:
        rows = setup.tokens_per_rank / method.n_nano_batches
        window_seconds = rows * setup.linear_seconds_per_token(Phase.FORWARD)
        limit = int(method.byte_budget * network * window_seconds)
    return replace(
        method.options,
        network_bytes_per_second=network,
        host_bytes_per_second=cluster.rank_host_bandwidth_bytes_per_second,
        max_process_bytes=limit,
        rank_hosts=tuple(cluster.host_of(rank) for rank in range(cluster.n_ranks)),
    )


def _microbatches(setup: Setup, lengths: Int64Array, method: Method) -> list[Manifest]:
    """The manifest of each microbatch over the pipelines."""
    tokens = setup.n_pipelines * setup.tokens_per_rank
    return [
        method.pack(part, setup.n_pipelines, setup.tokens_per_rank, method.n_nano_batches)
        for part in take_steps(lengths, setup.n_microbatches, tokens)
    ]


def tick_manifest(manifests: list[Manifest], tick: PooledTick, n_pipelines: int) -> Manifest:
    """The manifest of what all stages run in the forward half of ``tick``.

    Rank ``stage * n_pipelines + pipeline`` holds the rows; stages that idle hold none. The
    backward half is the same with mirrored stages, which changes nothing but names where all
    ranks are alike, so one plan serves both.
    """
    n_stages = len(tick.forward)
    if n_stages == 1:
        (microbatch,) = tick.forward
        assert microbatch is not None, "a pipeline of one stage never idles"
        return manifests[microbatch]
    active = [
        (stage, manifests[microbatch])
        for stage, microbatch in enumerate(tick.forward)
        if microbatch is not None
    ]
    n_documents = np.array([manifest.n_documents for _, manifest in active])
    first = np.cumsum(n_documents) - n_documents
    nano_batch = np.concatenate([m.document_nano_batch for _, m in active])
    # Documents are sorted by (nano-batch, id): stages are interleaved by a stable sort.
    order = np.argsort(nano_batch, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    document = np.concatenate(
        [place[m.segment_document + at] for (_, m), at in zip(active, first, strict=True)]
    )
    segments = np.argsort(document, kind="stable")
    rank = np.concatenate([m.segment_rank + stage * n_pipelines for stage, m in active])
    offset, length, row = (
        np.concatenate([getattr(m, name) for _, m in active])[segments]
        for name in ("segment_offset", "segment_length", "segment_row")
    )
    return Manifest(
        step=active[0][1].step,
        n_ranks=n_stages * n_pipelines,
        n_nano_batches=active[0][1].n_nano_batches,
        document_id=np.arange(len(order)),
        document_length=np.concatenate([m.document_length for _, m in active])[order],
        document_nano_batch=nano_batch[order],
        segment_document=document[segments],
        segment_offset=offset,
        segment_length=length,
        segment_rank=rank[segments],
        segment_row=row,
    )
