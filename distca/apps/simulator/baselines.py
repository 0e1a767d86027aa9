"""Step times of what people do without disaggregation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.schedule import Kind, Schedule
from core_attention.schedule_orders import Order, one_f_one_b
from distca.apps.simulator.context_parallel import gather_seconds, sharded_seconds
from distca.apps.simulator.pipeline import schedule_seconds
from distca.apps.simulator.profile import document_seconds
from distca.apps.simulator.repacking import Bins, bins_in_order, repack
from distca.apps.simulator.setup import Setup, stage_layers

LayerSeconds = Callable[[Kind], Float64Array]
"""``[n_bins]`` seconds of one layer for each bin, by the kind of action."""


def balanced_seconds(setup: Setup, lengths: Int64Array, order: Order = one_f_one_b) -> float:
    """The step if attention were spread perfectly over all pipelines and microbatches and nothing
    had to move; with pipeline stages, that many equal microbatches in ``order``."""
    everything = bins_in_order(lengths, 1, setup.step_tokens, setup.rank_profile)
    n_bins = setup.n_pipelines * setup.n_microbatches
    even = Bins(
        everything.tokens / n_bins,
        everything.forward_seconds / n_bins,
        everything.backward_seconds / n_bins,
    )
    equal = np.zeros((setup.n_microbatches, 1), dtype=np.int64)
    schedule = order(setup.n_stages, setup.n_microbatches)
    layer = partial(_layer_seconds, setup, even)
    (seconds,) = schedule_seconds(schedule, _action_seconds(setup, layer, equal, schedule))
    return float(seconds) + setup.gradient_sync_seconds


def plain_packing(setup: Setup, lengths: Int64Array, order: Order = one_f_one_b) -> float:
    """Step seconds of documents in the order in which they come, T tokens on each rank."""
    n_bins = setup.n_pipelines * setup.n_microbatches
    bins = bins_in_order(lengths, n_bins, setup.tokens_per_rank, setup.rank_profile)
    layer = partial(_layer_seconds, setup, bins)
    return _step_seconds(setup, layer, setup.n_pipelines, order, sort=False)


def repacked(setup: Setup, lengths: Int64Array, order: Order = one_f_one_b) -> float:
    """Step seconds of whole documents arranged so that bins take equal time, T tokens on each rank;
    as they come, where that is faster."""
    bins = repack(
        lengths,
        *(document_seconds(setup.rank_profile, lengths, phase) for phase in Phase),
        linear_seconds_per_token=_linear_seconds_per_token(setup),
        n_bins=setup.n_pipelines * setup.n_microbatches,
    )
    layer = partial(_layer_seconds, setup, bins)
    arranged = _step_seconds(setup, layer, setup.n_pipelines, order, sort=True)
    return min(arranged, plain_packing(setup, lengths, order))


def context_parallel(setup: Setup, lengths: Int64Array, group_size: int) -> float:
    """Step seconds if groups of ``group_size`` ranks share every document; whole documents are
    re-packed over the groups. The gather of K and V is waited for in every layer, as in most
    frameworks. Groups of 1 are :func:`repacked`; others divide the pipelines."""
    if group_size == 1:
        return repacked(setup, lengths)
    n_groups = setup.n_pipelines // group_size
    bins = repack(
        lengths,
        *(sharded_seconds(setup.rank_profile, lengths, group_size, phase) for phase in Phase),
        linear_seconds_per_token=_linear_seconds_per_token(setup) / group_size,
        n_bins=n_groups * setup.n_microbatches,
    )
    per_rank = Bins(bins.tokens / group_size, bins.forward_seconds, bins.backward_seconds)
    gather = gather_seconds(bins.tokens, setup.model.attention_shape, group_size, setup.cluster)

    def layer(kind: Kind) -> Float64Array:
        computed = _layer_seconds(setup, per_rank, kind)
        return computed if kind.attention_phase is None else computed + gather

    return _step_seconds(setup, layer, n_groups, one_f_one_b, sort=True)


def best_context_parallel(setup: Setup, lengths: Int64Array) -> float:
    """The least of :func:`context_parallel` over all group sizes that are powers of two, 1 among
    them: like the paper's "WLB-ideal", which sweeps data against context parallelism."""
    sizes = (2**k for k in range(setup.n_pipelines.bit_length()))
    return min(
        context_parallel(setup, lengths, size) for size in sizes if setup.n_pipelines % size == 0
    )


def _step_seconds(
    setup: Setup, layer: LayerSeconds, n_groups: int, order: Order, *, sort: bool
) -> float:
    """The slowest pipeline over its bins, which are dealt to the ``n_groups`` pipelines."""
    whole = layer(Kind.FORWARD) + layer(Kind.BACKWARD)
    dealt = _deal(whole, n_groups, setup.n_microbatches, sort=sort)
    schedule = order(setup.n_stages, setup.n_microbatches)
    seconds = _action_seconds(setup, layer, dealt, schedule)
    return float(schedule_seconds(schedule, seconds).max()) + setup.gradient_sync_seconds


def _action_seconds(
    setup: Setup, layer: LayerSeconds, dealt: Int64Array, schedule: Schedule
) -> dict[Kind, Float64Array]:
    """``[n_microbatches, n_groups]`` seconds of one stage for each kind of action."""
    n_layers = stage_layers(setup, schedule)
    return {kind: np.asarray(layer(kind)[dealt] * n_layers) for kind in Kind}


def _layer_seconds(setup: Setup, bins: Bins, kind: Kind) -> Float64Array:
    layer = bins.tokens * setup.action_seconds_per_token(kind)
    if kind.attention_phase is None:
        return np.asarray(layer)
    forward = kind.attention_phase is Phase.FORWARD
    return np.asarray(layer + (bins.forward_seconds if forward else bins.backward_seconds))


def _deal(seconds: Float64Array, n_groups: int, n_microbatches: int, *, sort: bool) -> Int64Array:
    """``[n_microbatches, n_groups]`` the bin of each microbatch of each pipeline.

    Sorted bins are dealt to and fro, so that pipelines get nearly equal sums.
    """
    if not sort:
        return np.arange(len(seconds)).reshape(n_microbatches, n_groups)
    order = np.argsort(-seconds, kind="stable").reshape(n_microbatches, n_groups)
    order[1::2] = order[1::2, ::-1]
    return order


def _linear_seconds_per_token(setup: Setup) -> float:
    return sum(setup.linear_seconds_per_token(phase) for phase in Phase)
