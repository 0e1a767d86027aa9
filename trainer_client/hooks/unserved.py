"""The kinds of calls of core attention that nobody computes: in the recomputation of a checkpoint,
and in runs for shapes alone."""

from __future__ import annotations

import torch

from trainer_client.hooks.checkpointing import Checkpoints, Recomputed, Result
from trainer_client.hooks.compile_boundary import refuse_tracing
from trainer_client.hooks.pipelining_dry_run import is_shape_inference, of_the_right_shape
from trainer_client.hooks.tensor_parallel import check_local


def answer_unserved(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, checkpoints: Checkpoints
) -> Result | None:
    """Answers a call that nobody is to compute; None if servers or the rank itself are.

    Args:
        q: ``[rows, num_heads, head_dim]``.
        k, v: ``[rows, num_heads_kv, head_dim]`` and ``head_dim_v``.
        checkpoints: around the call.
    """
    refuse_tracing()
    check_local(q=q, k=k, v=v)
    recomputed = checkpoints.recomputed
    if is_shape_inference(recomputed):
        return of_the_right_shape(q, k, v, checkpoints)
    if recomputed:
        o, lse = Recomputed.apply(q, k, v, *recomputed.take())  # type: ignore[no-untyped-call]
        return o, lse
    return None
