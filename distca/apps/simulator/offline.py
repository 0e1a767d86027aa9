"""Offline planning: what the planner would do with a user's documents, and what that is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.plan import Plan, imbalance
from distca.apps.simulator.comparison import Comparison, compare, mean_comparison
from distca.apps.simulator.disaggregated import (
    DisaggregatedStep,
    Method,
    SlotWork,
    attention_seconds,
    disaggregated_step,
    plan_lengths,
    tick_time,
)
from distca.apps.simulator.packing import as_trained
from distca.apps.simulator.repacking import bins_in_order
from distca.apps.simulator.setup import Setup
from distca.apps.simulator.traffic import count_endpoints, exchange
from distca.apps.simulator.verdict import Judgement, Network, Remedy, Worth, judge, kind_of
from distca.contract.settings import Placement

SLOWEST_NETWORK, FASTEST_NETWORK = 1e8, 1e13
"""Bytes/s of one GPU between which the network that pays is looked for."""


@dataclass(frozen=True, eq=False, kw_only=True)
class OfflineBatch:
    """One batch under its plan.

    Attributes:
        setup: what was planned for.
        plan: of the batch.
        works: by phase, of each nano-batch of a layer under the plan.
        before_seconds: ``[n_ranks]`` attention of one layer, forward and backward, if documents
            stay where plain packing puts them.
        after_seconds: ``[n_servers]`` the same under the plan.
        moved_bytes: ``[n_endpoints, n_endpoints]`` from row to column in one layer, forward and
            backward, requests and replies.
        comparison: the step in all ways.
    """

    setup: Setup
    plan: Plan
    works: dict[Phase, list[SlotWork]]
    before_seconds: Float64Array
    after_seconds: Float64Array
    moved_bytes: Int64Array
    comparison: Comparison

    @property
    def home_imbalance(self) -> float:
        """Max / mean attention seconds before."""
        return imbalance(self.before_seconds)

    def on_network(self, gpu_bandwidth_bytes_per_second: float) -> Comparison:
        """The comparison under the same plan where a GPU's network carries so much in each
        direction."""
        cluster = replace(
            self.setup.cluster, gpu_bandwidth_bytes_per_second=gpu_bandwidth_bytes_per_second
        )
        step = _step(replace(self.setup, cluster=cluster), self.works)
        return replace(self.comparison, disaggregated=step)


def plan_batch(
    setup: Setup,
    lengths: Int64Array,
    method: Method,
    placement: Placement = Placement.IN_PLACE,
    n_pool_servers: int = 0,
) -> OfflineBatch:
    """Plans one batch of ``setup.step_tokens`` tokens, without pipeline stages."""
    profile = setup.rank_profile
    ranks = setup.cluster.n_ranks
    lengths = as_trained(lengths, ranks, setup.tokens_per_rank, method.n_nano_batches)
    plan, works = plan_lengths(setup, lengths, method, placement, n_pool_servers)
    before = bins_in_order(lengths, ranks, setup.tokens_per_rank, profile)
    after = [
        attention_seconds(plan, profile, phase, k)
        for phase in Phase
        for k in range(method.n_nano_batches)
    ]
    return OfflineBatch(
        setup=setup,
        plan=plan,
        works=works,
        before_seconds=before.forward_seconds + before.backward_seconds,
        after_seconds=np.sum(after, axis=0),
        moved_bytes=_moved_bytes(setup, plan),
        comparison=compare(setup, lengths, _step(setup, works), len(plan.servers)),
    )


def compare_batches(setup: Setup, batches: Sequence[Int64Array], method: Method) -> Comparison:
    """The means over batches of a step in all ways, with servers in the ranks. All ways train the
    documents that nano-batches hold.
    """
    trained = [
        as_trained(batch, setup.n_pipelines, setup.tokens_per_rank, method.n_nano_batches)
        for batch in batches
    ]
    return mean_comparison(
        [
            compare(setup, batch, disaggregated_step(setup, batch, method), setup.cluster.n_ranks)
            for batch in trained
        ]
    )


def judge_batches(
    batches: Sequence[OfflineBatch], remedies: Sequence[Remedy] = tuple(Remedy)
) -> Judgement:
    """The verdict on one or more batches. ``remedies``: those that are not in use yet."""
    found = mean_comparison([batch.comparison for batch in batches])
    network = None
    if kind_of(found) in (Worth.SLOWER, Worth.LINKS_TOO_SLOW, Worth.GAIN):
        here = batches[0].setup.cluster.gpu_bandwidth_bytes_per_second
        network = Network(here, _pays_from(batches))
    return judge(found, remedies, network)


def _step(setup: Setup, works: dict[Phase, list[SlotWork]]) -> DisaggregatedStep:
    ticks = [tick_time(setup, of_phase, setup.layers_per_stage) for of_phase in works.values()]
    return DisaggregatedStep.of(ticks)


def _pays_from(batches: Sequence[OfflineBatch]) -> float | None:
    """The slowest network, in bytes/s of a GPU, on which the same plans are a gain, to 2%."""

    def pays(bandwidth: float) -> bool:
        changed = mean_comparison([batch.on_network(bandwidth) for batch in batches])
        return kind_of(changed) is Worth.GAIN

    too_slow, fast = SLOWEST_NETWORK, FASTEST_NETWORK
    if not pays(fast):
        return None
    while fast / too_slow > 1.02:
        middle = float(np.sqrt(too_slow * fast))
        too_slow, fast = (too_slow, middle) if pays(middle) else (middle, fast)
    return fast


def what_bounds(batch: OfflineBatch) -> str:
    """Describes what a step under the plan waits for."""
    waits = batch.comparison.exposed_share
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
