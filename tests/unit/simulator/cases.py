"""Small setups that the simulator's tests share."""

from __future__ import annotations

from typing import Any

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.cost_model import CostProfile
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.lengths import sample_lengths
from distca.apps.simulator.model import ModelSpec
from distca.apps.simulator.setup import Setup
from tests.support.planning_cases import uniform_profile

K = 1024

SMALL_MODEL = ModelSpec(
    name="small",
    n_layers=4,
    hidden_size=1024,
    intermediate_size=4096,
    num_heads=8,
    num_heads_kv=2,
    vocab_size=1000,
)


def flat_profile(seconds_per_pair: float = 1e-12) -> CostProfile:
    """Every query-key pair takes the same time, backward twice that."""
    return uniform_profile(seconds_per_pair, SMALL_MODEL.attention_shape, backward=2.0)


def setup(n_gpus: int = 4, **changes: Any) -> Setup:
    """Ranks of one GPU on hosts of their own, a flat profile, 16K tokens each."""
    cluster = {
        "tensor_parallel": 1,
        "gpus_per_host": 1,
        "gpu_bandwidth_bytes_per_second": 50e9,
        **changes.pop("cluster", {}),
    }
    return Setup(
        **{
            "model": SMALL_MODEL,
            "cluster": ClusterSpec(n_gpus=n_gpus, **cluster),
            "profile": flat_profile(),
            "tokens_per_rank": 16 * K,
            **changes,
        }
    )


def documents(of: Setup, seed: int = 0, name: str = "prolong") -> Int64Array:
    """Documents of one step."""
    return np.asarray(sample_lengths(name, of.step_tokens, of.tokens_per_rank, seed))
