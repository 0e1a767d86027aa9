"""Per-document context parallelism: every document cut evenly over a group of ranks.

Each document is cut into ``2 c`` chunks and rank i of the group's c gets chunks i and
``2 c - 1 - i``, so all have the same number of query-key pairs; the keys and values of the whole
group are gathered in the forward pass and kept, and their gradients are scattered in the backward
pass (paper, section 2.3; the scheme of Llama 3 and of WLB-LLM).
"""

from __future__ import annotations

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase, causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.shape import AttentionShape
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.profile import document_seconds

SHORTEST_CHUNK_TOKENS = 128
"""Documents whose chunks would be shorter stay whole on one rank of the group, in perfect balance:
kinder to the baseline than cutting them, where kernels run slowly."""


def sharded_seconds(
    profile: CostProfile, lengths: Int64Array, group_size: int, phase: Phase
) -> Float64Array:
    """``[n]`` seconds of each document on each rank of a group that shares it, one layer.

    A chunk runs at the kernel's rate for its query length and two thirds of the document's keys,
    the mean over query-key pairs; rates change slowly with the key length.
    """
    whole = document_seconds(profile, lengths, phase) / group_size
    if group_size == 1:
        return whole
    chunk = lengths // (2 * group_size)
    cut = np.flatnonzero(chunk >= SHORTEST_CHUNK_TOKENS)
    q, kv = chunk[cut], np.maximum(lengths[cut] * 2 // 3, chunk[cut])
    rate = profile.seconds(q, kv, phase) / causal_qk_pairs(kv - q, kv)
    pairs = causal_qk_pairs(np.zeros_like(q), lengths[cut])
    whole[cut] = pairs * rate / group_size
    return whole


def gather_seconds(
    group_tokens: Float64Array | Int64Array,
    shape: AttentionShape,
    group_size: int,
    cluster: ClusterSpec,
) -> Float64Array:
    """Seconds of one gather of K and V (or scatter of dK and dV) in one layer, on every rank.

    A ring: each rank receives all rows but its own, in ``c - 1`` messages, over the slowest link.
    """
    within_host = group_size <= cluster.ranks_per_host
    bandwidth = (
        cluster.rank_host_bandwidth_bytes_per_second
        if within_host
        else cluster.rank_bandwidth_bytes_per_second
    )
    moved = np.asarray(group_tokens) * (shape.kv_row_bytes * (group_size - 1) / group_size)
    return np.asarray(moved / bandwidth + (group_size - 1) * cluster.message_latency_seconds)
