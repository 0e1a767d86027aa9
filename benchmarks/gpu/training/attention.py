"""Core attention of the baselines: whole documents at home, and context parallelism.

Both are called by transformers like any attention implementation, and leave out the recomputation
of a checkpointed layer as DistCA's does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from benchmarks.gpu.training.stopwatch import Stopwatch
from core_attention.arrays import Int64Array, exclusive_cumsum
from core_attention.kernels.protocol import BackwardPart, ForwardPart, Kernel, TaskBatch
from core_attention.kernels.row_dots import row_dots
from core_attention.manifest import RankManifest
from trainer_client.hooks.checkpointing import Checkpoints, Recomputed

IMPLEMENTATION = "benchmark"

FORWARD, BACKWARD = "attention forward", "attention backward"
"""What is timed."""

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Attention(Protocol):
    """Core attention of one rank's packed rows; q ``[rows, heads, dim]``, k, v likewise."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, like q, and what the backward pass wants of the log-sum-exp."""

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> Grads:
        """dq, dk and dv."""


class _TimedKernel:
    """Calls of a kernel with one set of tensors, timed.

    Args:
        kernel: runs the tasks.
        watch: times the calls.
    """

    def __init__(self, kernel: Kernel, watch: Stopwatch) -> None:
        self._kernel, self._watch = kernel, watch

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tasks: TaskBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """o, like q, and lse, ``[rows, heads]`` in float32."""
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        with self._watch.timed(FORWARD):
            self._kernel.forward([ForwardPart(q, k, v, o, lse, tasks)], q.shape[-1] ** -0.5)
        return o, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        do: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor,
        tasks: TaskBatch,
    ) -> Grads:
        """dq, like q, and dk and dv in float32."""
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (k, v))
        part = BackwardPart(q, k, v, do, lse, delta, dq, dk, dv, tasks)
        with self._watch.timed(BACKWARD):
            self._kernel.backward([part], q.shape[-1] ** -0.5)
        return dq, dk, dv


class WholeDocuments:
    """Documents that lie whole on this rank: one plain library call a layer.

    Args:
        kernel: runs them where the library of its name is not FlashAttention-4.
        manifest: of this rank, one nano-batch.
        device: of the tensors.
        watch: times the calls.
    """

    def __init__(
        self, kernel: Kernel, manifest: RankManifest, device: torch.device, watch: Stopwatch
    ) -> None:
        self._kernel, self._watch = _TimedKernel(kernel, watch), watch
        lengths = np.array([segment.length for segment in manifest.nano_batches[0]])
        begin = exclusive_cumsum(lengths)
        self._tasks = TaskBatch(begin, begin + lengths, begin, begin + lengths, begin)
        bounds = torch.tensor([*begin, int(lengths.sum())], dtype=torch.int32, device=device)
        self._library: Any = None
        if kernel.name == "fa4":
            self._library = importlib.import_module("flash_attn.cute.interface")
            self._call = {
                "causal": True,
                "cu_seqlens_q": bounds,
                "cu_seqlens_k": bounds,
                "max_seqlen_q": max(int(lengths.max()), 1024),
                "max_seqlen_k": max(int(lengths.max()), 1024),
            }

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Attention`."""
        if self._library is None:
            return self._kernel.forward(q, k, v, self._tasks)
        with self._watch.timed(FORWARD):
            o, lse, *_ = self._library._flash_attn_fwd(
                q, k, v, softmax_scale=q.shape[-1] ** -0.5, return_lse=True, **self._call
            )
        return o, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> Grads:
        """See :class:`Attention`."""
        if self._library is None:
            dq, dk, dv = self._kernel.backward(q, k, v, do, lse, row_dots(do, o), self._tasks)
            return dq, dk.to(q.dtype), dv.to(q.dtype)
        with self._watch.timed(BACKWARD):
            dq, dk, dv, *_ = self._library._flash_attn_bwd(
                q, k, v, o, do, lse, softmax_scale=q.shape[-1] ** -0.5, **self._call
            )
        return dq, dk, dv


class GatheredKeys:
    """Per-document context parallelism: every rank gathers all keys and values.

    The heads are taken in two groups, so that the keys of the second are gathered, and the
    gradients of the first reduced, while the other group is computed.

    Args:
        kernel: runs the tasks.
        manifests: of all ranks, one nano-batch.
        rank: this rank.
        device: of the tensors.
        watch: times the kernel calls and the waits.
        group: process group of its own, so that its messages do not queue behind weights.
        n_groups: of heads.
    """

    def __init__(
        self,
        kernel: Kernel,
        manifests: Sequence[RankManifest],
        rank: int,
        device: torch.device,
        watch: Stopwatch,
        group: dist.ProcessGroup,
        n_groups: int = 2,
    ) -> None:
        self._kernel, self._watch, self._n_groups = _TimedKernel(kernel, watch), watch, n_groups
        self._group = group
        held = [manifest.nano_batches[0] for manifest in manifests]
        lengths = {s.document_id: s.document_length for segments in held for s in segments}
        documents = sorted(lengths)
        first_key = dict(
            zip(
                documents,
                exclusive_cumsum(np.array([lengths[d] for d in documents])).tolist(),
                strict=True,
            )
        )
        self._n_ranks = len(held)
        self._rows = sum(s.length for s in held[rank])
        # A collective wants equal sizes: shorter ranks send rows that nobody reads.
        self._padded = max(sum(s.length for s in segments) for segments in held)
        place = np.empty(sum(lengths.values()), dtype=np.int64)
        for other, segments in enumerate(held):
            row = other * self._padded
            for s in segments:
                at = first_key[s.document_id] + s.offset
                place[at : at + s.length] = np.arange(row, row + s.length)
                row += s.length
        self._place = torch.from_numpy(place).to(device)
        self._tasks = self._make_tasks(held[rank], first_key)

    @staticmethod
    def _make_tasks(segments: Sequence[Any], first_key: dict[int, int]) -> TaskBatch:
        length = np.array([s.length for s in segments])
        q_begin = exclusive_cumsum(length)
        k_begin = np.array([first_key[s.document_id] for s in segments])
        k_end: Int64Array = k_begin + np.array([s.offset + s.length for s in segments])
        return TaskBatch(q_begin, q_begin + length, k_begin, k_end, k_begin)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Attention`."""
        o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        pending = self._gather(k, v, 0)
        for group in range(self._n_groups):
            keys, values = self._wait_keys(pending)
            if group + 1 < self._n_groups:
                pending = self._gather(k, v, group + 1)
            heads = self._heads(q, group)
            o[:, heads], lse[:, heads] = self._kernel.forward(
                q[:, heads].contiguous(), keys, values, self._tasks
            )
        return o, lse

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        o: torch.Tensor,
        lse: torch.Tensor,
        do: torch.Tensor,
    ) -> Grads:
        """See :class:`Attention`."""
        delta = row_dots(do, o)
        dq = torch.empty_like(q)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        reducing: list[tuple[int, Any, torch.Tensor, torch.Tensor]] = []
        pending = self._gather(k, v, 0)
        for group in range(self._n_groups):
            keys, values = self._wait_keys(pending)
            if group + 1 < self._n_groups:
                pending = self._gather(k, v, group + 1)
            heads = self._heads(q, group)
            rows = (tensor[:, heads].contiguous() for tensor in (q, do, lse, delta))
            part_q, part_do, part_lse, part_delta = rows
            dq[:, heads], part_dk, part_dv = self._kernel.backward(
                part_q, keys, values, part_do, part_lse, part_delta, self._tasks
            )
            reducing.append((group, *self._reduce(part_dk, part_dv, q.dtype)))
        for group, work, _, own in reducing:
            with self._watch.timed("wait"):
                work.wait()
            kv_heads = self._heads(k, group)
            dk[:, kv_heads], dv[:, kv_heads] = own[: self._rows, 0], own[: self._rows, 1]
        return dq, dk, dv

    def _async(self, collective: Any, out: torch.Tensor, given: torch.Tensor) -> Any:
        return collective(out, given, group=self._group, async_op=True)

    def _heads(self, tensor: torch.Tensor, group: int) -> slice:
        share = tensor.shape[1] // self._n_groups
        return slice(group * share, (group + 1) * share)

    def _gather(
        self, k: torch.Tensor, v: torch.Tensor, group: int
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        heads = self._heads(k, group)
        mine = k.new_zeros((self._padded, 2, heads.stop - heads.start, k.shape[2]))
        mine[: self._rows, 0], mine[: self._rows, 1] = k[:, heads], v[:, heads]
        everyone = mine.new_empty((self._n_ranks * self._padded, *mine.shape[1:]))
        return self._async(dist.all_gather_into_tensor, everyone, mine), everyone, mine

    def _wait_keys(
        self, pending: tuple[Any, torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        work, everyone, _ = pending
        with self._watch.timed("wait"):
            work.wait()
        return (everyone[:, at].index_select(0, self._place) for at in range(2))  # type: ignore[return-value]

    def _reduce(
        self, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype
    ) -> tuple[Any, torch.Tensor, torch.Tensor]:
        everyone = dk.new_zeros((self._n_ranks * self._padded, 2, *dk.shape[1:]), dtype=dtype)
        everyone[self._place, 0], everyone[self._place, 1] = dk.to(dtype), dv.to(dtype)
        own = everyone.new_empty((self._padded, *everyone.shape[1:]))
        return self._async(dist.reduce_scatter_tensor, own, everyone), everyone, own


class UnsentKeys(GatheredKeys):
    """Context parallelism whose messages cost nothing: what it gains at most by hiding them.

    Every rank takes its own keys in the place of the others', and keeps its own share of the
    gradients. Kernels, copies and memory are those of :class:`GatheredKeys`; losses mean nothing.
    """

    def _async(self, collective: Any, out: torch.Tensor, given: torch.Tensor) -> Any:
        if len(out) > len(given):
            out.view(self._n_ranks, *given.shape).copy_(given)
        else:
            out.copy_(given[: len(out)])
        return _Done()


class _Done:
    """A collective that is over."""

    def wait(self) -> None:
        """Returns."""


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attention: Attention,
        checkpoints: Checkpoints,
    ) -> torch.Tensor:
        o, lse = attention.forward(q, k, v)
        checkpoints.keep(attention, o, lse)
        ctx.attention = attention
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return *ctx.attention.backward(*ctx.saved_tensors, do.contiguous()), None, None


_current: list[Attention] = []


def use(attention: Attention | None) -> None:
    """What models with ``attn_implementation=IMPLEMENTATION`` call from now on."""
    _current[:] = [] if attention is None else [attention]


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
    checkpoints = Checkpoints()
    if region := checkpoints.recomputed:
        return Recomputed.apply(q, k, v, *region.take())[0][None], None  # type: ignore[no-untyped-call]
    o = _Operation.apply(q, k, v, _current[0], checkpoints)  # type: ignore[no-untyped-call]
    return o[None], None


AttentionInterface.register(IMPLEMENTATION, _attention)
AttentionMaskInterface.register(IMPLEMENTATION, lambda *_, **__: None)
