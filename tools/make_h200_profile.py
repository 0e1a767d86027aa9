"""Writes the simulator's ``profiles/h200-llama3-8b.json``: one H200, FlashAttention-4, Llama-3-8B.

The cost profile for planning without a GPU at hand. It interpolates a few measured throughputs
(TFLOP/s, one H200, bf16, 32 query heads, 8 key/value heads, head dim 128):

* *shards*: fused tasks of one q length with much longer contexts;
* *documents*: whole documents, kv = q, whose last tiles are half masked.

Throughput is linear in the logarithm of the q length within each list. Between a document
(kv = q) and a shard (kv of 4 q and more) it is linear in log kv. Documents shorter than the
shortest one measured keep its ratio to shards of that length; below 32 queries throughput falls
in proportion, because a tile is computed whole; above the longest q it stays.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from core_attention.ca_task import causal_qk_pairs
from core_attention.cost_model import CostProfile
from core_attention.shape import AttentionShape

SHAPE = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")
SHARD_TOKENS = (32, 64, 128, 256, 512, 1024, 4096)
SHARD_TFLOPS = {
    "forward": (479, 563, 620, 668, 649, 687, 692),
    "backward": (56, 111, 196, 305, 415, 474, 535),
}
DOCUMENT_TOKENS = (4096, 8192, 32768, 131072)
DOCUMENT_TFLOPS = {"forward": (518, 608, 728, 646), "backward": (465, 500, 590, 599)}
LONG_CONTEXT = 4.0
"""kv / q from which a task counts as a shard."""


def tflops(q: int, kv: int, phase: str) -> float:
    """Throughput of a task of ``q`` queries and ``kv`` >= q keys."""
    shard, document = _shard_tflops(q, phase), _document_tflops(q, phase)
    weight = min(np.log(kv / q) / np.log(LONG_CONTEXT), 1.0)
    return float((1 - weight) * document + weight * shard)


def _shard_tflops(q: int, phase: str) -> float:
    if q < SHARD_TOKENS[0]:
        return SHARD_TFLOPS[phase][0] * q / SHARD_TOKENS[0]
    shard = float(np.interp(np.log(q), np.log(SHARD_TOKENS), SHARD_TFLOPS[phase]))
    if q <= SHARD_TOKENS[-1]:
        return shard
    return max(shard, _document_tflops(q, phase))


def _document_tflops(q: int, phase: str) -> float:
    if q < DOCUMENT_TOKENS[0]:
        ratio = DOCUMENT_TFLOPS[phase][0] / SHARD_TFLOPS[phase][-1]
        return ratio * _shard_tflops(q, phase)
    return float(np.interp(np.log(q), np.log(DOCUMENT_TOKENS), DOCUMENT_TFLOPS[phase]))


def make_profile() -> CostProfile:
    """The profile on a grid of powers of two up to 1M tokens."""
    grid = 2 ** np.arange(21)
    seconds = {
        phase: np.array([[_seconds(int(q), int(max(q, kv)), phase) for kv in grid] for q in grid])
        for phase in ("forward", "backward")
    }
    return CostProfile(
        device="NVIDIA H200",
        kernel="flash-attn-4",
        shape=SHAPE,
        q_tokens=grid,
        kv_tokens=grid,
        forward_seconds=seconds["forward"],
        backward_seconds=seconds["backward"],
    )


def _seconds(q: int, kv: int, phase: str) -> float:
    pairs = int(causal_qk_pairs(np.array(kv - q), np.array(kv)))
    return SHAPE.qk_flops(pairs, backward=phase == "backward") / (tflops(q, kv, phase) * 1e12)


def main() -> None:
    root = Path(__file__).resolve().parent.parent
    make_profile().save(root / "distca/apps/simulator/profiles" / "h200-llama3-8b.json")


if __name__ == "__main__":
    main()
