"""Offline planning: what the planner would do with a user's documents, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.plan import Plan, imbalance
from distca.simulator.baselines import (
    balanced_seconds,
    best_context_parallel,
    plain_packing,
    repacked,
)
from distca.simulator.comparison import MEMORY_SLACK
from distca.simulator.disaggregated import (
    Method,
    SlotWork,
    TickTime,
    attention_seconds,
    plan_works,
    planning_options,
    tick_time,
)
from distca.simulator.fleet import Placement, build_servers
from distca.simulator.packing import as_trained
from distca.simulator.profile import document_seconds
from distca.simulator.repacking import bins_in_order
from distca.simulator.setup import Setup
from distca.simulator.traffic import count_endpoints, exchange
from distca.simulator.verdict import Evidence, Kind, Remedy, Verdict, judge, kind_of

SLOWEST_NETWORK, FASTEST_NETWORK = 1e8, 1e13
"""Bytes/s of one GPU between which the network that pays is looked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedBatch:
    """One batch: its plan, and step times with and without it.

    Attributes:
        setup: what was planned for.
        plan: of the batch.
        works: by phase, of each nano-batch of a layer under the plan.
        before_seconds: ``[n_ranks]`` attention of one layer, forward and backward, if documents
            stay where plain packing puts them.
        after_seconds: ``[n_servers]`` the same under the plan.
        planned_imbalance: worst over nano-batches and phases of max / mean under the plan.
        moved_bytes: ``[n_endpoints, n_endpoints]`` from row to column in one layer, forward and
            backward, requests and replies.
        heaviest_document_share: attention of the heaviest document / that of a mean rank.
        balanced_seconds: the step if attention were spread evenly and nothing moved.
        attention_share: of that step.
        plain_seconds, repacked_seconds, context_parallel_seconds, hidden_gather_seconds: as in
            :class:`~distca.simulator.verdict.Evidence`.
        disaggregated_seconds: the step under the plan.
        exposed_seconds: of it, waiting for communication.
    """

    setup: Setup
    plan: Plan
    works: dict[Phase, list[SlotWork]]
    before_seconds: Float64Array
    after_seconds: Float64Array
    planned_imbalance: float
    moved_bytes: Int64Array
    heaviest_document_share: float
    balanced_seconds: float
    attention_share: float
    plain_seconds: float
    repacked_seconds: float
    context_parallel_seconds: float
    hidden_gather_seconds: float
    disaggregated_seconds: float
    exposed_seconds: float

    @property
    def home_imbalance(self) -> float:
        """Max / mean attention seconds before."""
        return imbalance(self.before_seconds)

    def on_network(self, gpu_bandwidth_bytes_per_second: float) -> PlannedBatch:
        """The same plan where a GPU's network carries so much in each direction."""
        cluster = replace(
            self.setup.cluster, gpu_bandwidth_bytes_per_second=gpu_bandwidth_bytes_per_second
        )
        ticks = _ticks(replace(self.setup, cluster=cluster), self.works)
        return replace(
            self,
            disaggregated_seconds=sum(tick.seconds for tick in ticks),
            exposed_seconds=sum(tick.exposed_seconds for tick in ticks),
        )


def plan_batch(
    setup: Setup,
    lengths: Int64Array,
    method: Method,
    placement: Placement = Placement.IN_PLACE,
    n_pool_servers: int = 0,
) -> PlannedBatch:
    """Plans one batch of ``setup.step_tokens`` tokens, without pipeline stages.

    Raises:
        InputError: the tokens do not match, or the servers do not fit the placement.
        PlanError: no plan can be made.
    """
    profile = setup.rank_profile
    ranks = setup.cluster.n_ranks
    lengths = as_trained(lengths, ranks, setup.tokens_per_rank, method.n_parts)
    manifest = method.pack(lengths, ranks, setup.tokens_per_rank, method.n_nano_batches)
    servers = build_servers(setup.cluster, profile, placement, n_pool_servers)
    plan = method.planner(
        manifest, servers, setup.model.attention_shape, planning_options(setup, method)
    )
    works = {phase: plan_works(setup, plan, phase) for phase in Phase}
    ticks = _ticks(setup, works)
    nano_batches = range(method.n_nano_batches)
    before = bins_in_order(lengths, ranks, setup.tokens_per_rank, profile)
    before_seconds = before.forward_seconds + before.backward_seconds
    heaviest = sum(document_seconds(profile, lengths, phase) for phase in Phase)
    balanced = balanced_seconds(setup, lengths)
    return PlannedBatch(
        setup=setup,
        plan=plan,
        works=works,
        before_seconds=before_seconds,
        after_seconds=sum(
            (attention_seconds(plan, profile, phase, k) for phase in Phase for k in nano_batches),
            start=np.zeros(len(servers)),
        ),
        planned_imbalance=max(tick.imbalance for tick in ticks),
        moved_bytes=_moved_bytes(setup, plan),
        heaviest_document_share=float(np.max(heaviest) / before_seconds.mean()),
        balanced_seconds=balanced,
        attention_share=float(before_seconds.mean()) * setup.model.n_layers / balanced,
        plain_seconds=plain_packing(setup, lengths).seconds,
        repacked_seconds=repacked(setup, lengths, 1.0).seconds,
        context_parallel_seconds=best_context_parallel(
            setup, lengths, 1.0, hidden_gather=False
        ).seconds,
        hidden_gather_seconds=best_context_parallel(
            setup, lengths, MEMORY_SLACK, hidden_gather=True
        ).seconds,
        disaggregated_seconds=sum(tick.seconds for tick in ticks),
        exposed_seconds=sum(tick.exposed_seconds for tick in ticks),
    )


def judge_batches(
    batches: Sequence[PlannedBatch], remedies: Sequence[Remedy] = tuple(Remedy)
) -> Verdict:
    """The verdict on one or more batches. ``remedies``: those that are not in use yet."""
    evidence = _evidence(batches, remedies)
    if kind_of(evidence) in (Kind.SLOWER, Kind.LINKS_TOO_SLOW, Kind.GAIN):
        evidence = replace(
            evidence,
            network_bytes_per_second=batches[0].setup.cluster.gpu_bandwidth_bytes_per_second,
            pays_from_bytes_per_second=_pays_from(batches),
        )
    return judge(evidence)


def _ticks(setup: Setup, works: dict[Phase, list[SlotWork]]) -> list[TickTime]:
    return [tick_time(setup, of_phase, setup.layers_per_stage) for of_phase in works.values()]


def _pays_from(batches: Sequence[PlannedBatch]) -> float | None:
    """The slowest network, in bytes/s of a GPU, on which the same plans are a gain, to 2%."""

    def pays(bandwidth: float) -> bool:
        changed = [batch.on_network(bandwidth) for batch in batches]
        return kind_of(_evidence(changed, ())) is Kind.GAIN

    too_slow, fast = SLOWEST_NETWORK, FASTEST_NETWORK
    if not pays(fast):
        return None
    while fast / too_slow > 1.02:
        middle = float(np.sqrt(too_slow * fast))
        too_slow, fast = (too_slow, middle) if pays(middle) else (middle, fast)
    return fast


def _evidence(batches: Sequence[PlannedBatch], remedies: Sequence[Remedy]) -> Evidence:
    def mean(name: str) -> float:
        return float(np.mean([getattr(batch, name) for batch in batches]))

    took = mean("disaggregated_seconds")
    return Evidence(
        n_servers=len(batches[0].plan.servers),
        heaviest_document_share=max(batch.heaviest_document_share for batch in batches),
        attention_share=mean("attention_share"),
        exposed_share=mean("exposed_seconds") / took,
        plain_seconds=mean("plain_seconds"),
        repacked_seconds=mean("repacked_seconds"),
        context_parallel_seconds=mean("context_parallel_seconds"),
        hidden_gather_seconds=mean("hidden_gather_seconds"),
        disaggregated_seconds=took,
        remedies=tuple(remedies),
    )


def what_bounds(batch: PlannedBatch) -> str:
    """In words, what a step under the plan waits for."""
    waits = batch.exposed_seconds / batch.disaggregated_seconds
    sent = batch.moved_bytes.sum(axis=1)
    busiest = int(np.argmax(sent)) if sent.size else 0
    slowest = int(np.argmax(batch.after_seconds))
    name = batch.plan.servers[slowest].server_id
    compute = (
        f"server {name} has {batch.after_seconds[slowest] * 1e3:.2f} ms of attention a layer, "
        f"{imbalance(batch.after_seconds):.3f} of the mean"
    )
    if waits < 0.005:
        return f"compute: {compute}; communication hides behind it"
    return (
        f"communication for {waits:.1%} of the step: endpoint {busiest} sends "
        f"{sent[busiest] / 1e9:.3f} GB a layer; besides, {compute}"
    )


def _moved_bytes(setup: Setup, plan: Plan) -> Int64Array:
    total = np.zeros((count_endpoints(plan),) * 2, dtype=np.int64)
    for phase in Phase:
        for nano_batch in range(plan.manifest.n_nano_batches):
            both = exchange(plan, setup.model.attention_shape, phase, nano_batch)
            total += both.request.matrix() + both.reply.matrix()
    return total
