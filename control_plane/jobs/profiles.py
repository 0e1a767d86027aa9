"""The choice of a server's cost profile for a job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np

from core_attention.arrays import int64_column
from core_attention.ca_task import qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.errors import ProfileError
from core_attention.shape import AttentionShape

NOMINAL_FLOPS = 1e12
"""The profile of a server that measured nothing. Where all are alike, plans do not depend on it."""


def profile_for(profiles: Sequence[CostProfile], shape: AttentionShape) -> CostProfile:
    """The profile measured with ``shape``, else the nearest one scaled to it by FLOPs.

    Nearest means: the same dtype if there is one, then the closest head dims (they decide how well
    a kernel uses the device), then the closest numbers of heads, then the first.
    """
    if not profiles:
        raise ProfileError(f"there is no cost profile to plan shape {shape} with")
    return _scaled(min(profiles, key=lambda profile: _distance(profile.shape, shape)), shape)


@lru_cache(maxsize=256)
def nominal_profile(shape: AttentionShape) -> CostProfile:
    """The profile of a server that has measured none: seconds in proportion to FLOPs."""
    tokens = int64_column([1, 2], "tokens")
    q, kv = tokens[:, None], np.maximum(tokens[None, :], tokens[:, None])
    forward = qk_pairs(q, kv, shape.mask) * shape.qk_flops(1) / NOMINAL_FLOPS
    return CostProfile(
        device="not measured",
        kernel="nominal",
        shape=shape,
        q_tokens=tokens,
        kv_tokens=tokens,
        forward_seconds=forward,
        # Five matrix products instead of two.
        backward_seconds=2.5 * forward,
    )


def _distance(have: AttentionShape, want: AttentionShape) -> tuple[bool, float, float]:
    def apart(*names: str) -> float:
        return sum(abs(math.log(getattr(have, n) / getattr(want, n))) for n in names)

    return (
        have.mask is not want.mask or have.dtype != want.dtype,
        apart("head_dim", "head_dim_v"),
        apart("num_heads", "num_heads_kv"),
    )


# Cached so that servers with one profile share one object too once it is scaled: planners may
# then evaluate it once for all of them.
@lru_cache(maxsize=1024)
def _scaled(profile: CostProfile, shape: AttentionShape) -> CostProfile:
    if profile.shape == shape:
        return profile
    q = profile.q_tokens[:, None]
    kv = np.maximum(profile.kv_tokens[None, :], q)
    pairs = qk_pairs(q, kv, shape.mask) / qk_pairs(q, kv, profile.shape.mask)
    ratio = pairs * (shape.qk_flops(1) / profile.shape.qk_flops(1))
    return replace(
        profile,
        shape=shape,
        forward_seconds=profile.forward_seconds * ratio,
        backward_seconds=profile.backward_seconds * ratio,
    )
