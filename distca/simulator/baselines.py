"""Step times of what people do without disaggregation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from distca.simulator.context_parallel import gather_seconds, sharded_seconds
from distca.simulator.errors import InputError
from distca.simulator.pipeline import one_f_one_b_seconds
from distca.simulator.repacking import Bins, bins_in_order, repack, repack_whole
from distca.simulator.setup import Setup


@dataclass(frozen=True)
class StepTime:
    """The time of one step under one method.

    Attributes:
        seconds: of the step.
        context_parallel: ranks that share each document; 1 is none.
        token_imbalance: most tokens on a rank in a microbatch / mean: memory above even packing.
    """

    seconds: float
    context_parallel: int = 1
    token_imbalance: float = 1.0


def balanced_seconds(setup: Setup, lengths: Int64Array) -> float:
    """The step if attention were spread perfectly over all pipelines and microbatches and nothing
    had to move; with pipeline stages, a perfectly balanced 1F1B."""
    everything = bins_in_order(lengths, 1, setup.step_tokens, setup.rank_profile)
    n_bins = setup.n_pipelines * setup.n_microbatches
    even = Bins(
        everything.tokens / n_bins,
        everything.forward_seconds / n_bins,
        everything.backward_seconds / n_bins,
    )
    slots = setup.n_microbatches + setup.n_stages - 1
    per_slot = sum(float(_stage_seconds(setup, even, phase)[0]) for phase in Phase)
    return slots * per_slot + setup.gradient_sync_seconds


def plain_packing(setup: Setup, lengths: Int64Array) -> StepTime:
    """Documents in the order in which they come, T tokens on each rank."""
    n_bins = setup.n_pipelines * setup.n_microbatches
    bins = bins_in_order(lengths, n_bins, setup.tokens_per_rank, setup.rank_profile)
    return StepTime(_step_seconds(setup, bins, setup.n_pipelines, sort=False))


def repacked(setup: Setup, lengths: Int64Array, token_slack: float) -> StepTime:
    """Whole documents arranged so that bins take equal time, with up to ``token_slack * T``
    tokens on a rank."""
    n_bins = setup.n_pipelines * setup.n_microbatches
    bins = repack_whole(
        lengths,
        setup.rank_profile,
        _linear_seconds_per_token(setup),
        n_bins,
        _cap_tokens(setup.tokens_per_rank, token_slack),
    )
    seconds = _step_seconds(setup, bins, setup.n_pipelines, sort=True)
    return StepTime(seconds, 1, float(bins.tokens.max() / setup.tokens_per_rank))


def repacked_context_parallel(
    setup: Setup, lengths: Int64Array, token_slack: float, group_size: int, *, hidden_gather: bool
) -> StepTime:
    """Groups of ``group_size`` ranks share every document; whole documents are re-packed over the
    groups.

    Args:
        setup: what is simulated.
        lengths: documents of the step.
        token_slack: most tokens of a group / its even share; 1 or more.
        group_size: ranks of a group; divides the pipelines.
        hidden_gather: whether the gather of K and V runs entirely behind compute, as far as there
            is compute to hide it, or is waited for in every layer, as most frameworks do.
    """
    if setup.n_pipelines % group_size:
        raise InputError(
            f"context-parallel groups of {group_size} ranks do not divide the "
            f"{setup.n_pipelines} pipelines"
        )
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
    seconds = _step_seconds(
        setup, per_rank, n_groups, sort=True, gather=gather, hidden=hidden_gather
    )
    return StepTime(seconds, group_size, float(bins.tokens.max() / group_tokens))


def best_context_parallel(
    setup: Setup, lengths: Int64Array, token_slack: float, *, hidden_gather: bool
) -> StepTime:
    """The fastest of :func:`repacked_context_parallel` over all group sizes that are powers of two,
    1 among them: like the paper's "WLB-ideal", which sweeps data against context parallelism."""
    sizes = [2**k for k in range(setup.n_pipelines.bit_length())]
    candidates = [
        repacked_context_parallel(setup, lengths, token_slack, c, hidden_gather=hidden_gather)
        for c in sizes
        if setup.n_pipelines % c == 0
    ]
    return min(candidates, key=lambda candidate: candidate.seconds)


def _step_seconds(
    setup: Setup,
    bins: Bins,
    n_groups: int,
    *,
    sort: bool,
    gather: Float64Array | None = None,
    hidden: bool = False,
) -> float:
    """The slowest pipeline's 1F1B over its bins, which are dealt to the ``n_groups`` pipelines."""
    phases = [_stage_seconds(setup, bins, phase, gather, hidden) for phase in Phase]
    order = _deal(phases[0] + phases[1], n_groups, setup.n_microbatches, sort=sort)
    forward, backward = (seconds[order] for seconds in phases)
    pipelines = one_f_one_b_seconds(forward, backward, setup.n_stages)
    return float(pipelines.max()) + setup.gradient_sync_seconds


def _stage_seconds(
    setup: Setup,
    bins: Bins,
    phase: Phase,
    gather: Float64Array | None = None,
    hidden: bool = False,
) -> Float64Array:
    """``[n_bins]`` seconds of one stage for each bin, one phase."""
    attention = bins.forward_seconds if phase is Phase.FORWARD else bins.backward_seconds
    layer = bins.tokens * setup.linear_seconds_per_token(phase) + attention
    if gather is not None:
        layer = np.maximum(layer, gather) if hidden else layer + gather
    return np.asarray(layer * setup.layers_per_stage)


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


def _cap_tokens(tokens: int, slack: float) -> int:
    if not slack >= 1:
        raise InputError(f"token slack is {slack}; it must be 1 or more")
    return int(tokens * slack)
