"""PyTorch's ring under the benchmark's layout, on CPU processes: its kernel, which runs on CUDA
devices only, is replaced by the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu.training import batches
from benchmarks.gpu.training.batches import draw_batch
from benchmarks.gpu.training.ring import RingAttention
from benchmarks.gpu.training.stopwatch import Stopwatch
from tests.support.preloaded import run_forked

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
TOKENS_PER_RANK = 12
ATEN = torch.ops.aten


def scores(q: torch.Tensor, k: torch.Tensor, causal: bool, scale: float) -> torch.Tensor:
    """Of heads that share keys as grouped queries do, ``[batch, heads, q rows, k rows]``."""
    found = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT * scale
    if causal:
        later = torch.ones(found.shape[-2:], dtype=torch.bool).triu(1)
        found = found.masked_fill(later, -torch.inf)
    return found


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    assert scale is not None
    found = scores(q, k, is_causal, scale)
    groups = q.shape[1] // k.shape[1]
    o = found.softmax(-1) @ v.repeat_interleave(groups, dim=1)
    # As on CUDA devices: without bounds of sequences, and with the state of an unused generator.
    sizes, state = (q.shape[2], k.shape[2]), torch.empty(0)
    return o, found.logsumexp(-1), None, None, *sizes, state, state, state


def flash_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor,
    cum_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    assert scale is not None
    groups = query.shape[1] // key.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    p = (scores(query, key, is_causal, scale) - logsumexp[..., None]).exp()
    ds = p * (grad_out @ values.mT - (grad_out * out).sum(-1, keepdim=True)) * scale
    dk, dv = (
        x.unflatten(1, (key.shape[1], groups)).sum(2) for x in (ds.mT @ query, p.mT @ grad_out)
    )
    return ds @ keys, dk, dv


def run_rank(rank: int, n_ranks: int, folder: Path) -> None:
    """Compares this rank's rows with a plain causal attention of the whole document."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", flash_backward, "CPU")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n_ranks
    )
    torch.manual_seed(0)
    batch = draw_batch(0, n_ranks, TOKENS_PER_RANK, batches.ONE_DOCUMENT)
    length = n_ranks * TOKENS_PER_RANK
    q = torch.randn(length, HEADS, HEAD_DIM, requires_grad=True)
    k, v = (torch.randn(length, KV_HEADS, HEAD_DIM, requires_grad=True) for _ in range(2))
    do = torch.randn(length, HEADS, HEAD_DIM)
    by_head = [x.transpose(0, 1)[None] for x in (q, k, v)]
    whole = torch.nn.functional.scaled_dot_product_attention(
        by_head[0], by_head[1], by_head[2], is_causal=True, enable_gqa=True
    )[0].transpose(0, 1)
    torch.autograd.backward(whole, do)
    mine = torch.cat(
        [
            torch.arange(segment.offset, segment.offset + segment.length)
            for segment in batches.zigzag(batch)[rank].nano_batches[0]
        ]
    )
    watch = Stopwatch(torch.device("cpu"))
    attention = RingAttention(torch.device("cpu"), watch, dist.new_group())
    with torch.no_grad():
        mine_q, mine_k, mine_v = q[mine], k[mine], v[mine]
        o, lse = attention.forward(mine_q, mine_k, mine_v)
        # Another layer goes forward before the first one goes backward.
        attention.forward(mine_v.repeat_interleave(2, dim=1), mine_v, mine_k)
        gradients = attention.backward(mine_q, mine_k, mine_v, o, lse, do[mine])
    torch.testing.assert_close(o, whole.detach()[mine], rtol=1e-4, atol=1e-5)
    for found, of in zip(gradients, (q, k, v), strict=True):
        assert of.grad is not None
        assert found.is_contiguous()
        torch.testing.assert_close(found, of.grad[mine], rtol=1e-4, atol=1e-5)
    assert watch.read().keys() == {"attention forward", "attention backward"}
    dist.destroy_process_group()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_the_rings_rows_are_those_of_the_whole_document(n_ranks: int, tmp_path: Path) -> None:
    run_forked(run_rank, (n_ranks, tmp_path), n_ranks)
