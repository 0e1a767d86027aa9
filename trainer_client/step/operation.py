"""Core attention as an autograd operation in two halves, tied by a token.

``_Send`` hands out Q, K and V and returns a token; ``_Collect`` takes the token and returns O. A
link ties the operations of nano-batches that share a document, see ``handed_over``.
Between the two the lane gives way. Autograd runs ready nodes in descending order of their creation,
so when two nano-batches interleave in the forward pass, the backward pass mirrors them by itself:
``_Collect.backward`` sends dO and returns at once, and ``_Send.backward`` waits for dQ, dK and dV
after the other nano-batch's node has had its turn.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from core_attention.score_rule import ScoreRule
from core_attention.tensor_checks import check_qkv
from trainer_client.errors import SessionError
from trainer_client.hooks.checkpointing import Checkpoints
from trainer_client.hooks.compile_boundary import outside_graphs, refuse_tracing
from trainer_client.hooks.differentiable_once import differentiable_once
from trainer_client.hooks.pipelining_dry_run import is_shape_inference, of_the_right_shape
from trainer_client.hooks.tensor_parallel import check_local
from trainer_client.hooks.thread_state import saved_tensor_hooks
from trainer_client.step.attention_call import AttentionCall
from trainer_client.step.handed_over import HandedOver
from trainer_client.step.home import HomeCall, attend_at_home, output_gradients
from trainer_client.step.home_tasks import LayerKind, home_tasks
from trainer_client.step.lane import require_own_lane
from trainer_client.step.running_step import RunningStep
from trainer_client.step.sinks import with_sinks


@outside_graphs
def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` within each document of the current nano-batch.

    Call it inside ``with session.step(n):``; if the step has several nano-batches, choose one by
    :func:`trainer_client.in_nano_batch`. Rows are those of the rank's manifest, in packed order. In
    an activation checkpoint it is run once, not again when activations are recomputed: see
    :mod:`trainer_client.hooks.checkpointing`.

    Which keys a query sees says the job's mask, ``AttentionShape.mask``. A layer with a window or
    with chunks is computed here, not by servers, and is none of the job's ``n_layers``; its heads
    and head dims may differ from the job's. With ``SessionOptions.windows`` servers compute those
    with windows too.

    Args:
        q: ``[rows, num_heads, head_dim]``, the job's dtype, contiguous.
        k: ``[rows, num_heads_kv, head_dim]``, likewise.
        v: ``[rows, num_heads_kv, head_dim_v]``, likewise.
        window: a query sees so many tokens at most, its own and those before it.
        chunk: documents are cut into chunks of so many tokens; a query sees its own and those
            before it in its chunk.
        sinks: ``[num_heads]``, any floating dtype: a learned score that takes weight from the keys
            and gives no value; see :mod:`trainer_client.step.sinks`.
        softcap: c of c * tanh(score / c), which takes the place of each scaled score; 0 is none.
            None: that of the job's shape, which servers apply, so another is an error in a layer
            that is served.
        scale: what multiplies q.k; None: the session's. Likewise.

    Returns:
        o ``[rows, num_heads, head_dim_v]``. Differentiable once, in the same step.

    Raises:
        CoreAttentionFailed: a server failed, or a deadline passed.
    """
    o, lse = core_attention_and_lse(
        q, k, v, window=window, chunk=chunk, softcap=softcap, scale=scale
    )
    return o if sinks is None else with_sinks(o, lse, sinks)


def core_attention_and_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`core_attention` without sinks, for models that change o by its lse themselves.

    Returns:
        o ``[rows, num_heads, head_dim_v]`` and lse ``[rows, num_heads]``, float32: the natural
        logarithm of the sum of a query's exponentiated scores. Both are differentiable once, in the
        same step.
    """
    refuse_tracing()
    check_local(q=q, k=k, v=v)
    checkpoints = Checkpoints()
    recomputed = checkpoints.recomputed
    if recomputed or is_shape_inference(recomputed):
        return of_the_right_shape(q, k, v, checkpoints)
    if chunk is None and (window is None or require_own_lane().running.job.windows):
        return _served(q, k, v, window, softcap, scale, checkpoints)
    return _at_home(q, k, v, LayerKind(window, chunk), softcap, scale, checkpoints)


def _served(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    softcap: float | None,
    scale: float | None,
    checkpoints: Checkpoints,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse by the job's servers."""
    lane = require_own_lane()
    running, nano_batch = lane.running, lane.nano_batch
    job = running.job
    check_qkv(q, k, v, job.call_shape, running.n_rows(nano_batch))
    _check_served("softcap", softcap, job.shape.softcap)
    _check_served("scale", scale, job.scale)
    needs_backward = _needs_backward(q, k, v)
    layer = running.forward_call(nano_batch, needs_backward=needs_backward)
    if job.windows and job.windows[layer] != (window or 0):
        raise SessionError(
            f"call {layer} has window {window}, and windows of SessionOptions {job.windows[layer]}"
        )
    taken, link = None, None
    name = f"layer {layer}"
    if running.carried(nano_batch):
        taken, link = running.take_over(nano_batch, name, needs_backward=needs_backward)
    copies = not _is_guarded(running, q, k, v)
    call = AttentionCall(running, layer, nano_batch, taken, copies_keys=copies)
    token, link = _Send.apply(q, k, v, link, call)  # type: ignore[no-untyped-call]
    if runs := running.carried(nano_batch + 1):
        handed = HandedOver(k, v, nano_batch, runs, copies=copies)
        call.handed_over = running.hand_over(nano_batch, name, handed, link)
    lane.give_way()
    detached = (tensor.detach() for tensor in (q, k, v))
    keep = functools.partial(checkpoints.keep, lane)
    o, lse = _Collect.apply(token, *detached, call, keep)  # type: ignore[no-untyped-call]
    return o, lse


def _needs_backward(*tensors: torch.Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _is_guarded(running: RunningStep, *tensors: torch.Tensor) -> bool:
    """Return whether autograd, which saves q, k and v itself, refuses to go on if they are written
    to before their backward pass."""
    return _needs_backward(*tensors) and not running.forward_only and not saved_tensor_hooks()


def _check_served(name: str, asked: float | None, of_job: float) -> None:
    if asked is not None and not math.isclose(asked, of_job, rel_tol=1e-6):
        where = "softcap of AttentionShape" if name == "softcap" else "softmax_scale"
        raise SessionError(
            f"core_attention was called with {name}={asked}, and the job's servers compute with "
            f"{of_job}; open the session with {where} {asked}, or leave {name} out"
        )


def _at_home(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kind: LayerKind,
    softcap: float | None,
    scale: float | None,
    checkpoints: Checkpoints,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of a layer that is not served."""
    lane = require_own_lane()
    running, nano_batch = lane.running, lane.nano_batch
    job, tasks = running.job, home_tasks(running, nano_batch, kind)
    softcap = job.shape.softcap if softcap is None else softcap
    call = HomeCall(
        tasks=tasks,
        rule=ScoreRule(window=kind.window, softcap=softcap),
        scale=job.scale if scale is None else scale,
    )
    number, link = running.home_call(nano_batch), None
    name = f"layer {number} of those at home"
    if running.carried(nano_batch) and tasks.handed_over:
        needs_backward = _needs_backward(q, k, v)
        call.taken_over, link = running.take_over(nano_batch, name, needs_backward=needs_backward)
    n_rows, keep = running.n_rows(nano_batch), functools.partial(checkpoints.keep, lane)
    o, lse, link = attend_at_home(q, k, v, n_rows, call, keep, link)
    if running.carried(nano_batch + 1) and tasks.handed_over:
        copies = not _is_guarded(running, q, k, v)
        handed = HandedOver(k, v, nano_batch, tasks.handed_over, copies=copies)
        call.handed_over = running.hand_over(nano_batch, name, handed, link)
    return o, lse


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        link: torch.Tensor | None,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.call, ctx.has_link = call, link is not None
        call.send_forward(q, k, v)
        return q.new_empty(0, dtype=torch.float32), q.new_empty(0, dtype=torch.float32)

    @staticmethod
    @outside_graphs
    @differentiable_once
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dq, dk, dv = ctx.call.collect_backward()
        ctx.call.end_step()
        # The operation that has given the link, of the nano-batch before, runs after this one.
        link = dq.new_empty(0, dtype=torch.float32) if ctx.has_link else None
        return dq, dk, dv, link, None


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
    ) -> tuple[torch.Tensor, torch.Tensor]:
        o, lse = call.collect_forward()
        keep(o, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, o, lse)
        return o, lse

    @staticmethod
    @outside_graphs
    @differentiable_once
    def backward(
        ctx: Any, do: torch.Tensor | None, dlse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        do, delta = output_gradients(o, do, dlse)
        ctx.call.send_backward({"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta})
        return do.new_empty(0, dtype=torch.float32), None, None, None, None, None, None
