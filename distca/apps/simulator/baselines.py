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
from distca.apps.simulator.repacking import Bins, bins_in_order, repack, repack_whole
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


def repacked(
    setup: Setup, lengths: Int64Array, token_slack: float, order: Order = one_f_one_b
) -> float:
    """Step seconds of whole documents arranged so that bins take equal time, with up to
    ``token_slack * T`` tokens on a rank; as they come, or with T tokens, where that is faster."""
    seconds = [plain_packing(setup, lengths, order)]
    for slack in _slacks(token_slack):
        bins = repack_whole(
            lengths,
            setup.rank_profile,
            _linear_seconds_per_token(setup),
            setup.n_pipelines * setup.n_microbatches,
            _cap_tokens(setup.tokens_per_rank, slack),
        )
        layer = partial(_layer_seconds, setup, bins)
        seconds.append(_step_seconds(setup, layer, setup.n_pipelines, order, sort=True))
    return min(seconds)


def repacked_context_parallel(
    setup: Setup, lengths: Int64Array, token_slack: float, group_size: int, *, hidden_gather: bool
) -> float:
    """Step seconds if groups of ``group_size`` ranks share every document; whole documents are
    re-packed over the groups, with fewer tokens than ``token_slack`` allows where that is faster.
    Groups of 1 are :func:`repacked`.

    Args:
        setup: what is simulated.
        lengths: documents of the step.
        token_slack: most tokens of a group / its even share; 1 or more.
        group_size: ranks of a group; divides the pipelines.
        hidden_gather: whether the gather of K and V runs entirely behind compute, as far as there
            is compute to hide it, or is waited for in every layer, as most frameworks do.
    """
    if setup.n_pipelines % group_size:
        raise ValueError(
            f"context-parallel groups of {group_size} ranks do not divide the "
            f"{setup.n_pipelines} pipelines"
        )
    if group_size == 1:
        return repacked(setup, lengths, token_slack)
    return min(
        _grouped(setup, lengths, slack, group_size, hidden_gather=hidden_gather)
        for slack in _slacks(token_slack)
    )


def _grouped(
    setup: Setup, lengths: Int64Array, token_slack: float, group_size: int, *, hidden_gather: bool
) -> float:
    n_groups = setup.n_pipelines // group_size
    forward, backward = (
        sharded_seconds(setup.rank_profile, lengths, group_size, phase) for phase in Phase
    )
    group_tokens = setup.tokens_per_rank * group_size
    bins = repack(
        lengths,
        forward,
        backward,
        _linear_seconds_per_token(setup) / group_size,
        n_groups * setup.n_microbatches,
        _cap_tokens(group_tokens, token_slack),
    )
    per_rank = Bins(bins.tokens / group_size, bins.forward_seconds, bins.backward_seconds)
    gather = gather_seconds(bins.tokens, setup.model.attention_shape, group_size, setup.cluster)

    def layer(kind: Kind) -> Float64Array:
        computed = _layer_seconds(setup, per_rank, kind)
        if kind.attention_phase is None:
            return computed
        return np.maximum(computed, gather) if hidden_gather else computed + gather

    return _step_seconds(setup, layer, n_groups, one_f_one_b, sort=True)


def best_context_parallel(
    setup: Setup, lengths: Int64Array, token_slack: float, *, hidden_gather: bool
) -> float:
    """The least of :func:`repacked_context_parallel` over all group sizes that are powers of two,
    1 among them: like the paper's "WLB-ideal", which sweeps data against context parallelism."""
    sizes = (2**k for k in range(setup.n_pipelines.bit_length()))
    return min(
        repacked_context_parallel(setup, lengths, token_slack, size, hidden_gather=hidden_gather)
        for size in sizes
        if setup.n_pipelines % size == 0
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


def _slacks(token_slack: float) -> list[float]:
    """The slack and none, so that more of it is never slower."""
    return [token_slack] if token_slack == 1 else [1.0, token_slack]


def _cap_tokens(tokens: int, slack: float) -> int:
    if not slack >= 1:
        raise ValueError(f"token slack is {slack}; it must be 1 or more")
    return int(tokens * slack)
