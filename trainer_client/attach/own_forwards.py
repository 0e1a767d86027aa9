"""Forward passes of a user's own model, and the functions by which it calls core attention.

The functions have flash-attn's signatures, so that an import is all that changes. The first forward
with gradients is computed at home on every rank: it shows how many calls there are, and of which
shape. Outside of an attached model's forwards, and without gradients, calls are computed at home.
"""

from __future__ import annotations

from contextvars import ContextVar, Token
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from core_attention.errors import TensorError
from core_attention.host_copies import on_host
from core_attention.kernels.own import shape_of
from trainer_client.attach.forward import Forward, OpenWith
from trainer_client.hooks.checkpointing import Checkpoints, keep_nothing
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.local_attention.at_home import is_served_forward
from trainer_client.local_attention.plain import attend_documents
from trainer_client.models.found_options import ServedCall, options_of_calls
from trainer_client.step import operation
from trainer_client.step.home_tasks import LayerKind
from trainer_client.step.lane import Lane, current_lane, current_step
from trainer_client.turns.branches import RowDocuments


class OwnForwards:
    """The forward passes of a model, each a step that begins with its first call.

    Args:
        model: calls core attention by the functions of this module.
        steps: see :data:`trainer_client.attach.forward.OpenWith`.
    """

    def __init__(self, model: nn.Module, steps: OpenWith) -> None:
        self._steps = steps
        self._known: list[ServedCall] = []
        self._learning: list[ServedCall] = []
        self._forwards: list[tuple[Forward, Token[OwnForwards | None]]] = []
        model.register_forward_pre_hook(outside_graphs(self._enter))
        model.register_forward_hook(outside_graphs(self._leave), always_call=True)

    def begins(self, call: ServedCall, lengths: list[int]) -> bool:
        """A call outside of any lane; returns whether it has one now."""
        if not (torch.is_grad_enabled() or is_served_forward()):
            return False
        if not self._known:
            self._learning.append(call)
            return False
        forward, steps = self._forwards[-1][0], self._steps(self._complete)
        if lengths:
            forward.begin(steps, RowDocuments(lengths))
        else:
            forward.begin_without_rows(steps)
        return bool(lengths)

    def _enter(self, model: nn.Module, *_: Any) -> None:
        token = current_forward.set(self)
        self._forwards.append((Forward(model), token))

    def _leave(self, _model: nn.Module, _arguments: Any, output: Any) -> None:
        forward, token = self._forwards.pop()
        current_forward.reset(token)
        if self._learning and not forward.has_failed:
            self._known = self._learning
        self._learning = []
        forward.end(output)

    def _complete(self, options: dict[str, Any]) -> dict[str, Any]:
        return options_of_calls(self._known, options)


current_forward: ContextVar[OwnForwards | None] = ContextVar("distca_own_forward", default=None)


@outside_graphs
def core_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    window: int | None = None,
    chunk: int | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T) v`` within each document of packed rows.

    Args:
        q, k, v, window, chunk, sinks, softcap, scale: see
            :func:`trainer_client.step.operation.core_attention`.
        cu_seqlens: ``[documents + 1]`` int, where documents begin and end; None: as the step that
            runs was planned.

    Returns:
        o ``[rows, num_heads, head_dim_v]``.
    """
    kind = LayerKind(window, chunk)
    if cu_seqlens is None or _has_lane():
        return operation.core_attention(
            q, k, v, window=window, chunk=chunk, sinks=sinks, softcap=softcap, scale=scale
        )
    lengths = _lengths(cu_seqlens, len(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    forward = current_forward.get()
    recomputed = Checkpoints().recomputed is not None
    if forward is not None and kind.is_full and not recomputed:
        shape = replace(shape_of(q, k, v), softcap=softcap or 0.0)
        if forward.begins(ServedCall(shape, scale, q.device), lengths):
            return operation.core_attention(q, k, v, sinks=sinks, softcap=softcap, scale=scale)
    keep_nothing(q)
    if not lengths:
        # Leads to the weights, which get gradients of zeros.
        return q.new_zeros(0, q.shape[1], v.shape[2]) + 0 * (q.sum() + k.sum() + v.sum())
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
    o = attend_documents(
        q, k, v, lengths, scale=scale, softcap=softcap or 0.0, sinks=sinks, kind=kind
    )
    return o[0].transpose(0, 1).contiguous()


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """flash-attn's function of that name, with core attention served; see there."""
    _refuse(
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
        causal=None if causal else False,
        cu_seqlens_k=None if _are_equal(cu_seqlens_q, cu_seqlens_k) else "other than cu_seqlens_q",
    )
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    return core_attention(
        q,
        k,
        v,
        cu_seqlens=cu_seqlens_q,
        window=_window(window_size),
        softcap=softcap,
        scale=softmax_scale,
    )


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """flash-attn's function of that name, with core attention served: each row of the batch is a
    document."""
    batch, tokens = q.shape[:2]
    if k.shape[1] != tokens:
        raise TensorError(
            f"q has {tokens} tokens and k {k.shape[1]}; keys of a cache are not served"
        )
    _refuse(
        dropout_p=dropout_p,
        alibi_slopes=alibi_slopes,
        return_attn_probs=return_attn_probs,
        causal=None if causal else False,
    )
    o = core_attention(
        *(tensor.flatten(0, 1).contiguous() for tensor in (q, k, v)),
        cu_seqlens=torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32),
        window=_window(window_size),
        softcap=softcap,
        scale=softmax_scale,
    )
    return o.reshape(batch, tokens, *o.shape[1:])


def _has_lane() -> bool:
    region = Checkpoints().recomputed
    caller = current_lane.get() if region is None else region.caller
    return isinstance(caller, Lane) or current_step.get() is not None


def _lengths(cu_seqlens: torch.Tensor, n_rows: int) -> list[int]:
    ends = on_host(cu_seqlens).tolist()
    if ends[:1] != [0] or ends[-1] != n_rows:
        raise TensorError(
            f"cu_seqlens is {ends[:4]}...{ends[-1:]}; it begins with 0 and ends with {n_rows}"
        )
    return [end - begin for begin, end in pairwise(ends)]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or torch.equal(on_host(one), on_host(other))


def _window(window_size: tuple[int, int]) -> int | None:
    """Keys that a query sees; flash-attn counts those before it."""
    before, _ = window_size
    return None if before < 0 else before + 1


def _refuse(**arguments: object) -> None:
    asked = {
        name: value
        for name, value in arguments.items()
        if value is not None
        and (name == "causal" or isinstance(value, torch.Tensor) or bool(value))
    }
    if asked:
        raise TensorError(f"{asked} is not served; use flash-attn's own function there")
