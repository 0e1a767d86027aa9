"""Core attention as an autograd operation in two halves, tied by a token.

``_Send`` hands out Q, K and V and returns a token; ``_Collect`` takes the token and returns O.
Between the two the lane gives way. Autograd runs ready nodes in descending order of their creation,
so when two nano-batches interleave in the forward pass, the backward pass mirrors them by itself:
``_Collect.backward`` sends dO and returns at once, and ``_Send.backward`` waits for dQ, dK and dV
after the other nano-batch's node has had its turn.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from core_attention.kernels.row_dots import row_dots
from core_attention.tensor_checks import check_qkv
from trainer_client.integrations.checkpointing import Checkpoints, Recomputed
from trainer_client.integrations.graphs import outside_graphs
from trainer_client.integrations.probe import current_recorder
from trainer_client.integrations.shape_inference import is_shape_inference, of_the_right_shape
from trainer_client.step.attention_call import AttentionCall
from trainer_client.step.lane import require_lane


@outside_graphs
def core_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal ``softmax(scale * q k^T) v`` within each document of the current nano-batch.

    Call it inside ``with session.step(n):``, and inside :class:`trainer_client.PingPong` if the
    step has several nano-batches. Rows are those of the rank's manifest, in packed order. In an
    activation checkpoint it is run once, not again when activations are recomputed: see
    :mod:`trainer_client.integrations.checkpointing`.

    Args:
        q: ``[rows, num_heads, head_dim]``, the job's dtype, contiguous.
        k: ``[rows, num_heads_kv, head_dim]``, likewise.
        v: ``[rows, num_heads_kv, head_dim_v]``, likewise.

    Returns:
        o ``[rows, num_heads, head_dim_v]``. Differentiable once, in the same step.

    Raises:
        TensorError: a shape, dtype, device or stride is wrong.
        SessionError: no step is running, or the call is one that the job does not have.
        CoreAttentionFailed: a server failed, or a deadline passed.
    """
    if (recorder := current_recorder.get()) is not None:
        return recorder.call(q, k, v)
    checkpoints = Checkpoints()
    region = checkpoints.recomputed
    if is_shape_inference(region):
        return of_the_right_shape(q, k, v, checkpoints)
    lane = require_lane()
    running, nano_batch = lane.running, lane.nano_batch
    check_qkv(q, k, v, running.job.shape, running.n_rows(nano_batch))
    if region:
        again: torch.Tensor = Recomputed.apply(q, k, v, *region.take())  # type: ignore[no-untyped-call]
        return again
    needs_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    layer = running.forward_call(nano_batch, needs_backward=needs_backward)
    call = AttentionCall(running, layer, nano_batch)
    token = _Send.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    lane.give_way()
    detached = (tensor.detach() for tensor in (q, k, v))
    keep = functools.partial(checkpoints.keep, lane)
    o: torch.Tensor = _Collect.apply(token, *detached, call, keep)  # type: ignore[no-untyped-call]
    return o


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        ctx.call = call
        call.send_forward(q, k, v)
        return q.new_empty(0, dtype=torch.float32)

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(ctx: Any, token_gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.call.collect_backward(), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        token: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: AttentionCall,
        keep: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> torch.Tensor:
        o, lse = call.collect_forward()
        keep(o, lse)
        ctx.call = call
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    @outside_graphs
    @once_differentiable
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        do = do.contiguous()
        delta = row_dots(do, o)
        ctx.call.send_backward({"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta})
        return do.new_empty(0, dtype=torch.float32), None, None, None, None, None, None
