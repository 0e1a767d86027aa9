"""Cost profiles for a rank: a measured one fitted to the model's heads and the rank's GPUs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core_attention.arrays import Float64Array, Int64Array
from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.shape import AttentionShape


def rank_profile(profile: CostProfile, shape: AttentionShape, tensor_parallel: int) -> CostProfile:
    """``profile`` for heads of ``shape`` divided over ``tensor_parallel`` GPUs.

    Seconds scale with the operations per query-key pair: kernels run one block per head, so at
    training lengths more heads mean more of the same work.
    """
    factor = shape.qk_flops(1) / profile.shape.qk_flops(1) / tensor_parallel
    return replace(
        profile,
        shape=shape,
        forward_seconds=profile.forward_seconds * factor,
        backward_seconds=profile.backward_seconds * factor,
    )


def document_seconds(profile: CostProfile, lengths: Int64Array, phase: Phase) -> Float64Array:
    """``[n]`` seconds of core attention of whole documents, one layer."""
    unique, inverse = np.unique(lengths, return_inverse=True)
    return profile.seconds(unique, unique, phase)[inverse]
