"""Step time with core attention disaggregation, from real plans.

Every tick is planned by the planner itself; attention seconds then come from the cost profile and
the plan's tasks, bytes from the routes that trainers and servers would derive, so that planners are
judged by one measure and not by their own forecasts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from control_plane.planner.planning import Planner, PlanningOptions, PlanningServer
from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, home_segment
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest
from core_attention.plan import Plan, level_seconds
from core_attention.schedule import Kind, Schedule, Slot, side_by_side
from core_attention.schedule_orders import Order, same_phase
from distca.apps.simulator.fleet import build_servers
from distca.apps.simulator.packing import as_trained, pack_in_order, take_steps
from distca.apps.simulator.ping_pong import (
    NanoBatchTimes,
    PortTransfer,
    exposed_seconds,
    stack_seconds,
)
from distca.apps.simulator.setup import Setup, stage_layers
from distca.apps.simulator.traffic import (
    Messages,
    count_endpoints,
    exchange,
    join,
    server_endpoints,
)
from distca.contract.settings import Placement

Packer = Callable[[Int64Array, int, int, int], Manifest]
"""``(lengths, n_ranks, tokens_per_rank, n_nano_batches) -> Manifest``: plain or planned homes."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to run disaggregation.

    Attributes:
        planner: makes the plan of every tick.
        options: its tolerance and cuts.
        pack: gives documents their homes.
        n_nano_batches: 2 with ping-pong, 1 without ("single stream").
        schedule: of pipelines with several stages.
        idle_aware: whether plans count what each rank computes beside attention, so that idle
            stages take more of it; else attention is spread evenly, as in the paper.
    """

    planner: Planner
    options: PlanningOptions
    pack: Packer = pack_in_order
    n_nano_batches: int = 2
    schedule: Order = same_phase
    idle_aware: bool = False

    def __post_init__(self) -> None:
        if self.n_nano_batches not in (1, 2):
            raise ValueError(f"nano_batches is {self.n_nano_batches}; valid are 1 and 2")


@dataclass(frozen=True)
class DisaggregatedStep:
    """The time of one step with disaggregation.

    Attributes:
        seconds: of the step.
        exposed_seconds: of them, those in which communication was waited for.
        imbalance: worst over slots and nano-batches of the busiest server's seconds / the level
            that a perfect plan reaches (:func:`core_attention.plan.level_seconds`).
        moved_bytes: of all ticks of one layer of every stage.
        idle_share: of the ranks' time, in which they compute nothing; 0 to 1.
        in_flight: most microbatches whose activations a rank keeps.
    """

    seconds: float
    exposed_seconds: float
    imbalance: float
    moved_bytes: int
    idle_share: float = 0.0
    in_flight: float = 1.0

    @classmethod
    def of(cls, ticks: Sequence[TickTime]) -> DisaggregatedStep:
        """The step that consists of ``ticks``, without what is idle or in flight."""
        return cls(
            sum(tick.seconds for tick in ticks),
            sum(tick.exposed_seconds for tick in ticks),
            max(tick.imbalance for tick in ticks),
            sum(tick.moved_bytes for tick in ticks),
        )


@dataclass(frozen=True)
class TickTime:
    """Seconds of the layers that one slot runs, and what they consist of; see
    :class:`DisaggregatedStep`. ``busy_seconds`` is the sum over ranks and pool servers."""

    seconds: float
    exposed_seconds: float
    imbalance: float
    moved_bytes: int
    busy_seconds: float


@dataclass(frozen=True, eq=False)
class SlotWork:
    """The work side by side in one nano-batch of one layer, endpoint by endpoint.

    Attributes:
        linear_seconds: ``[n_endpoints]``.
        attention_seconds: ``[n_endpoints]``.
        own_seconds: ``[n_endpoints]`` of them, of a rank's own tasks.
        request, reply: the messages of all ticks.
    """

    linear_seconds: Float64Array
    attention_seconds: Float64Array
    own_seconds: Float64Array
    request: Messages
    reply: Messages

    def divided(self, parts: int) -> SlotWork:
        """One of so many equal parts, with as many messages."""
        return SlotWork(
            self.linear_seconds / parts,
            self.attention_seconds / parts,
            self.own_seconds / parts,
            self.request.divided(parts),
            self.reply.divided(parts),
        )

    def beside(self, other: SlotWork) -> SlotWork:
        """Both at once."""
        return SlotWork(
            self.linear_seconds + other.linear_seconds,
            self.attention_seconds + other.attention_seconds,
            self.own_seconds + other.own_seconds,
            join(self.request, other.request),
            join(self.reply, other.reply),
        )


def attention_seconds(
    plan: Plan, profile: CostProfile, phase: Phase, nano_batch: int, *, own: bool = False
) -> Float64Array:
    """``[n_servers]`` busy seconds of one layer under the plan's tasks, ``profile`` on each; or of
    them those of the server's ``own`` rank."""
    tasks = plan.tasks(phase)
    chosen = plan.manifest.document_nano_batch[tasks.document] == nano_batch
    if own:
        home = plan.manifest.segment_rank[home_segment(plan.manifest, tasks)]
        ranks = [-1 if s.in_place_rank is None else s.in_place_rank for s in plan.servers]
        chosen &= home == np.array(ranks)[tasks.server]
    begin, end = tasks.q_begin[chosen], tasks.q_end[chosen]
    busy = np.zeros(len(plan.servers))
    np.add.at(busy, tasks.server[chosen], profile.seconds(end - begin, end, phase))
    return busy


def linear_work(rank_seconds: Float64Array, n_endpoints: int) -> SlotWork:
    """Linear parts alone, ``[n_ranks]`` seconds of one layer."""
    linear = np.zeros(n_endpoints)
    linear[: len(rank_seconds)] = rank_seconds
    nothing = Messages.none(n_endpoints)
    idle = np.zeros(n_endpoints)
    return SlotWork(linear, idle, idle, nothing, nothing)


def planned_work(setup: Setup, plan: Plan, phase: Phase, nano_batch: int) -> SlotWork:
    """The attention and messages of one nano-batch in one layer."""
    size = count_endpoints(plan)
    attention, own = np.zeros((2, size))
    for seconds, is_own in ((attention, False), (own, True)):
        seconds[server_endpoints(plan)] = attention_seconds(
            plan, setup.rank_profile, phase, nano_batch, own=is_own
        )
    messages = exchange(plan, setup.model.attention_shape, phase, nano_batch)
    return SlotWork(np.zeros(size), attention, own, messages.request, messages.reply)


def nano_batch_times(setup: Setup, work: SlotWork) -> NanoBatchTimes:
    """The parts of one nano-batch in one layer."""
    return NanoBatchTimes(
        work.linear_seconds,
        PortTransfer.of(work.request, setup.cluster),
        work.attention_seconds,
        PortTransfer.of(work.reply, setup.cluster),
    )


def tick_time(
    setup: Setup, works: Sequence[SlotWork], n_layers: int, *, idle_aware: bool = False
) -> TickTime:
    """``n_layers`` layers of one slot.

    Args:
        setup: what is simulated.
        works: of each nano-batch.
        n_layers: of the stages that run.
        idle_aware: whether the imbalance counts linear parts.
    """
    times = tuple(nano_batch_times(setup, work) for work in works)
    return TickTime(
        stack_seconds(times, n_layers),
        exposed_seconds(times, n_layers),
        max(_imbalance(work, idle_aware=idle_aware) for work in works),
        sum(work.request.total_bytes + work.reply.total_bytes for work in works),
        n_layers * sum(float((w.linear_seconds + w.attention_seconds).sum()) for w in works),
    )


def _imbalance(work: SlotWork, *, idle_aware: bool) -> float:
    base = work.linear_seconds * idle_aware
    level = float(level_seconds(base, work.attention_seconds.sum()))
    return float((base + work.attention_seconds).max()) / level if level else 1.0


def plan_works(setup: Setup, plan: Plan, phase: Phase) -> list[SlotWork]:
    """A tick of all ranks at once, nano-batch by nano-batch, linear parts included."""
    per_token, size = setup.linear_seconds_per_token(phase), count_endpoints(plan)
    return [
        linear_work(np.asarray(plan.manifest.tokens_per_rank(k) * per_token), size).beside(
            planned_work(setup, plan, phase, k)
        )
        for k in range(plan.manifest.n_nano_batches)
    ]


def plan_lengths(
    setup: Setup,
    lengths: Int64Array,
    method: Method,
    placement: Placement = Placement.IN_PLACE,
    n_pool_servers: int = 0,
) -> tuple[Plan, dict[Phase, list[SlotWork]]]:
    """The plan of one batch of ``setup.step_tokens`` tokens, without pipeline stages, and by phase
    the work of each nano-batch of a layer under it."""
    n_ranks, tokens = setup.cluster.n_ranks, setup.tokens_per_rank
    trained = as_trained(lengths, n_ranks, tokens, method.n_nano_batches)
    plan = method.planner(
        method.pack(trained, n_ranks, tokens, method.n_nano_batches),
        build_servers(setup.cluster, setup.rank_profile, placement, n_pool_servers),
        setup.model.attention_shape,
        planning_options(setup, method),
    )
    return plan, {phase: plan_works(setup, plan, phase) for phase in Phase}


def disaggregated_step(
    setup: Setup,
    lengths: Int64Array,
    method: Method,
    placement: Placement = Placement.IN_PLACE,
    n_pool_servers: int = 0,
) -> DisaggregatedStep:
    """The step of all pipelines and microbatches, every slot pooled over all ranks.

    Args:
        setup: what is simulated.
        lengths: documents of the step, ``setup.step_tokens`` tokens.
        method: planner, homes, nano-batches and schedule.
        placement: where servers run; pool servers come on top of the setup's ranks.
        n_pool_servers: of a pool.
    """
    schedule = method.schedule(setup.n_stages, setup.n_microbatches)
    n_layers = stage_layers(setup, schedule)
    servers = build_servers(setup.cluster, setup.rank_profile, placement, n_pool_servers)
    manifests = _microbatches(setup, lengths, method)
    n_slots = kind_slots(setup, schedule)
    times = [
        tick_time(
            setup,
            _slot_works(setup, slot, n_slots, manifests, servers, method),
            n_layers,
            idle_aware=method.idle_aware,
        )
        for slot in side_by_side(schedule, n_slots)
    ]
    step, busy = DisaggregatedStep.of(times), sum(time.busy_seconds for time in times)
    n_endpoints = setup.cluster.n_ranks + n_pool_servers
    return replace(
        step,
        seconds=step.seconds + setup.gradient_sync_seconds,
        idle_share=1 - busy / (step.seconds * n_endpoints),
        in_flight=schedule.peak_in_flight,
    )


def mean(values: Iterable[float]) -> float:
    """The mean of one value a batch."""
    return float(np.mean(list(values)))


def mean_step(steps: Sequence[DisaggregatedStep]) -> DisaggregatedStep:
    """Means over batches of seconds, bytes and idle time; of imbalance and in flight the most."""
    return DisaggregatedStep(
        mean(step.seconds for step in steps),
        mean(step.exposed_seconds for step in steps),
        max(step.imbalance for step in steps),
        round(mean(step.moved_bytes for step in steps)),
        mean(step.idle_share for step in steps),
        max(step.in_flight for step in steps),
    )


def kind_slots(setup: Setup, schedule: Schedule) -> dict[Kind, int]:
    """Slots that an action of each kind takes, in proportion to its linear part; 1 where ranks keep
    in step."""
    if schedule.keeps_in_step:
        return dict.fromkeys(Kind, 1)
    forward = setup.action_seconds_per_token(Kind.FORWARD)
    return {kind: round(setup.action_seconds_per_token(kind) / forward) for kind in Kind}


def _slot_works(
    setup: Setup,
    slot: Slot,
    n_slots: Mapping[Kind, int],
    manifests: Sequence[Manifest],
    servers: Sequence[PlanningServer],
    method: Method,
) -> list[SlotWork]:
    """The work in ``slot``, nano-batch by nano-batch, while a forward runs one layer: plans of all
    kinds of actions, one after the other, backwards first, whose pieces are the larger ones; each
    fills up what the ones before left."""
    nano_batches = range(method.n_nano_batches)
    linear = _linear_seconds(setup, slot, n_slots, manifests, method.n_nano_batches)
    options = planning_options(setup, method)
    shape = setup.model.attention_shape
    size = setup.cluster.n_ranks + sum(s.server.in_place_rank is None for s in servers)
    works = [linear_work(linear[k], size) for k in nano_batches]
    for kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.FORWARD):
        phase = kind.attention_phase
        held = [
            (rank, action.microbatch)
            for rank, action in enumerate(slot)
            if action is not None and action.kind is kind
        ]
        if phase is None or not held:
            continue
        manifest = slot_manifest(manifests, held, len(slot), setup.n_pipelines)
        # Plans are made for a whole layer, which takes this phase n_slots forward layers.
        whole = n_slots[kind]
        based = _with_bases(servers, works, phase, whole) if method.idle_aware else servers
        plan = method.planner(manifest, based, shape, options)
        works = [
            work.beside(planned_work(setup, plan, phase, k).divided(whole))
            for k, work in enumerate(works)
        ]
    return works


def _linear_seconds(
    setup: Setup,
    slot: Slot,
    n_slots: Mapping[Kind, int],
    manifests: Sequence[Manifest],
    n_nano_batches: int,
) -> Float64Array:
    """``[n_nano_batches, n_ranks]`` while a forward runs one layer."""
    linear = np.zeros((n_nano_batches, len(slot), setup.n_pipelines))
    for rank, action in enumerate(slot):
        if action is not None:
            per_token = setup.action_seconds_per_token(action.kind) / n_slots[action.kind]
            for k in range(n_nano_batches):
                linear[k, rank] = manifests[action.microbatch].tokens_per_rank(k) * per_token
    return linear.reshape(n_nano_batches, -1)


def _with_bases(
    servers: Sequence[PlanningServer], works: Sequence[SlotWork], phase: Phase, factor: int
) -> list[PlanningServer]:
    """``servers`` with ``factor`` times what their endpoints compute besides: the nano-batches'
    mean."""
    busy = factor * np.mean([w.linear_seconds + w.attention_seconds for w in works], axis=0)
    n_ranks = len(busy) - sum(server.server.in_place_rank is None for server in servers)
    based, pool = [], n_ranks
    for server in servers:
        at = server.server.in_place_rank
        if at is None:
            at, pool = pool, pool + 1
        seconds = float(busy[at])
        both = (seconds, 0.0) if phase is Phase.FORWARD else (0.0, seconds)
        based.append(replace(server, base_seconds=both))
    return based


def planning_options(setup: Setup, method: Method) -> PlanningOptions:
    """The method's options, with the links and hosts of the setup's cluster."""
    cluster = setup.cluster
    return replace(
        method.options,
        network_bytes_per_second=cluster.rank_bandwidth_bytes_per_second,
        host_bytes_per_second=cluster.rank_host_bandwidth_bytes_per_second,
        rank_hosts=tuple(cluster.host_of(rank) for rank in range(cluster.n_ranks)),
    )


def _microbatches(setup: Setup, lengths: Int64Array, method: Method) -> list[Manifest]:
    """The manifest of each microbatch over the pipelines."""
    tokens = setup.n_pipelines * setup.tokens_per_rank
    return [
        method.pack(part, setup.n_pipelines, setup.tokens_per_rank, method.n_nano_batches)
        for part in take_steps(lengths, setup.n_microbatches, tokens)
    ]


def slot_manifest(
    manifests: Sequence[Manifest],
    active: Sequence[tuple[int, int]],
    n_pipeline_ranks: int,
    n_pipelines: int,
) -> Manifest:
    """The manifest of what runs side by side.

    Args:
        manifests: of each microbatch over the pipelines.
        active: (rank of the pipelines, microbatch) of all ranks that run something.
        n_pipeline_ranks: ranks of one pipeline.
        n_pipelines: pipeline d of rank r holds its rows on rank ``r * n_pipelines + d``.
    """
    if n_pipeline_ranks == 1:
        ((_, microbatch),) = active
        return manifests[microbatch]
    held = [(rank, manifests[microbatch]) for rank, microbatch in active]
    n_documents = np.array([manifest.n_documents for _, manifest in held])
    first = np.cumsum(n_documents) - n_documents
    nano_batch = np.concatenate([m.document_nano_batch for _, m in held])
    # Documents are sorted by (nano-batch, id): microbatches are interleaved by a stable sort.
    order = np.argsort(nano_batch, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    columns = {
        name: np.concatenate([getattr(m, f"segment_{name}") for _, m in held])
        for name in ("offset", "length", "row")
    }
    columns["document"] = np.concatenate(
        [place[begin + m.segment_document] for (_, m), begin in zip(held, first, strict=True)]
    )
    columns["rank"] = np.concatenate([rank * n_pipelines + m.segment_rank for rank, m in held])
    by_document = np.argsort(columns["document"], kind="stable")
    return Manifest(
        step=held[0][1].step,
        n_ranks=n_pipeline_ranks * n_pipelines,
        n_nano_batches=held[0][1].n_nano_batches,
        document_id=np.arange(len(order)),
        document_length=np.concatenate([m.document_length for _, m in held])[order],
        document_nano_batch=nano_batch[order],
        whole=True,
        **{f"segment_{name}": values[by_document] for name, values in columns.items()},
    )
