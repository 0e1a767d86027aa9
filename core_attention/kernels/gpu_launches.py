"""The FlashAttention launches of a part's tasks, with the index tensors that they need.

A launch is one variable-length call: task b has the queries from ``cu_seqlens_q[b]`` on and the
keys from ``cu_seqlens_k[b]`` on, with the causal mask aligned to the last key of each. Everything
is derived from the :class:`TaskBatch` alone, once per step, and uploaded together, so that a
layer's call uploads nothing and never waits for the device.

In the backward pass a task's dK and dV lie where its keys lie, so tasks that share keys get copies
of them, and dK and dV of their own, which :mod:`core_attention.kernels.gpu_gradients` sums.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import torch

from core_attention.arrays import Int64Array, exclusive_cumsum, runs_to_rows
from core_attention.ca_task import Phase
from core_attention.host_copies import on_device
from core_attention.kernels.protocol import BackwardPart, TaskBatch

MAX_TASKS = 256
"""Tasks of a launch. Above it FlashAttention-4 takes other code paths, compiled apart."""

DEFAULT_WORKSPACE_KEYS = 2**16
"""Keys, summed over the tasks of a backward launch, if no single task has more. Bounds the memory
for copies of K and V and for dK and dV of every task: 16 KiB a key with 8 kv heads of 128, so
1 GiB. A launch of that many keys runs for milliseconds: on an H200, planned batches ran as fast as
with four times as many, and 0.5% slower with half. A task with more takes its heads in groups, see
:func:`head_groups`."""

SUM_ROWS = 8
"""Rows of dK that one program of the summing kernel handles."""

HeadGroup = tuple[slice, slice]
"""Heads of a call, and their key heads."""

ALIGNMENT_INTS = 4
"""Index tensors begin at multiples of 16 bytes, or FlashAttention copies them."""


@dataclass(frozen=True, eq=False)
class Rows:
    """Rows of a tensor: a slice, or the rows of an index.

    Attributes:
        span: half-open range that holds all of them.
        index: ``[n]`` int64 rows in order, or None for every row of ``span``.
    """

    span: slice
    index: torch.Tensor | None

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The rows: a view of a slice, a copy of indexed ones."""
        return tensor[self.span] if self.index is None else tensor.index_select(0, self.index)

    def put(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Writes ``values`` to the rows."""
        if self.index is None:
            tensor[self.span].copy_(values)
        else:
            tensor.index_copy_(0, self.index, values)


@dataclass(frozen=True, eq=False)
class GradientSum:
    """The rows of the tasks' dK (and dV) that add up to each row of the part's.

    Target rows are cut into blocks of at most SUM_ROWS rows in which the same tasks meet.

    Attributes:
        blocks: ``[n_blocks, 4]`` int32: first target row, rows, and the half-open range in
            ``shifts`` of the tasks that add to them, in the order of addition.
        shifts: ``[n]`` int32: a task's row minus the target row that it adds to.
    """

    blocks: torch.Tensor
    shifts: torch.Tensor


@dataclass(frozen=True, eq=False)
class Launch:
    """One call of a variable-length kernel.

    Attributes:
        q: rows that the call reads of q, lse, ... Where gaps are allowed they include rows of no
            task of the launch.
        written: the rows of its tasks, relative to ``q``; None if that is all of them.
        k: rows that the call reads of k and v.
        cu_seqlens_q, cu_seqlens_k: ``[n_tasks + 1]`` int32 first row of each task in those rows.
        seqused_q, seqused_k: ``[n_tasks]`` int32 queries and keys of each task.
        max_seqlen_q, max_seqlen_k: the most of any task.
        n_keys: of all tasks, those that several have counted for each.
        gradient_sum: of a backward launch.
    """

    q: Rows
    written: torch.Tensor | None
    k: Rows
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    seqused_q: torch.Tensor
    seqused_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    n_keys: int
    gradient_sum: GradientSum | None


class LaunchCache:
    """The launches of each task batch, kept as long as the batch lives.

    Args:
        device: where the index tensors go.
        gaps: whether the kernel takes lengths apart from offsets (``seqused``), so that it can
            leave rows out; otherwise rows are copied together where they have gaps.
        workspace_keys: see DEFAULT_WORKSPACE_KEYS.
    """

    def __init__(
        self, device: torch.device, *, gaps: bool, workspace_keys: int = DEFAULT_WORKSPACE_KEYS
    ) -> None:
        if workspace_keys < 1:
            raise ValueError(f"workspace_keys is {workspace_keys}; it must be 1 or more")
        self._device = device
        self._gaps = gaps
        self._workspace_keys = workspace_keys
        self._launches: WeakKeyDictionary[TaskBatch, dict[Phase, tuple[Launch, ...]]] = (
            WeakKeyDictionary()
        )

    @cached_property
    def _uploads(self) -> torch.cuda.Stream:
        """One for all: PyTorch hands out the same 32 streams again and again, and the next could be
        one on which a collective waits for other ranks."""
        return torch.cuda.Stream(self._device)

    def launches(self, tasks: TaskBatch, phase: Phase) -> tuple[Launch, ...]:
        """The launches of ``tasks``; together they run every task once."""
        by_phase = self._launches.setdefault(tasks, {})
        if phase not in by_phase:
            order = self._order(tasks, phase)
            by_phase[phase] = tuple(
                self._launch(tasks, order[begin:end], phase)
                for begin, end in itertools.pairwise(self._cuts(tasks, order, phase))
            )
        return by_phase[phase]

    def backward_launches(
        self, part: BackwardPart, workspace_keys: int | None = None
    ) -> Iterator[tuple[Launch, list[HeadGroup]]]:
        """The launches of a part's backward pass, and in which groups each takes its heads.

        Args:
            part: with as many heads as its tensors have.
            workspace_keys: beyond which heads are taken in groups; None: as everywhere.
        """
        limit = self._workspace_keys if workspace_keys is None else workspace_keys
        for launch in self.launches(part.tasks, Phase.BACKWARD):
            yield launch, head_groups(part.q.shape[1], part.k.shape[1], launch.n_keys, limit)

    def prepare(self, tasks: TaskBatch, phase: Phase) -> None:
        """Makes the launches of ``tasks`` now, on any thread; they are there when it returns."""
        with torch.cuda.stream(self._uploads):
            self.launches(tasks, phase)
        self._uploads.synchronize()

    def _order(self, tasks: TaskBatch, phase: Phase) -> Int64Array:
        """Forward, tasks with the most keys come first: their tiles take longest, and short ones
        fill the device at the end. Backward, kernels want the order of the queries, in which they
        lay their accumulators out; so do those that want tasks without gaps."""
        if phase is Phase.FORWARD and self._gaps:
            return np.argsort(tasks.k_begin - tasks.k_end, kind="stable")
        return np.argsort(tasks.q_begin, kind="stable")

    def _cuts(self, tasks: TaskBatch, order: Int64Array, phase: Phase) -> list[int]:
        """Bounds of the launches in ``order``."""
        limit = self._workspace_keys if phase is Phase.BACKWARD else None
        cuts, keys = [0], 0
        for at, length in enumerate((tasks.k_end - tasks.k_begin)[order].tolist()):
            full = at - cuts[-1] == MAX_TASKS or (limit is not None and keys + length > limit)
            if full and at > cuts[-1]:
                cuts.append(at)
                keys = 0
            keys += length
        return [*cuts, len(order)] if len(order) else []

    def _launch(self, tasks: TaskBatch, chosen: Int64Array, phase: Phase) -> Launch:
        q_begin, q_end = tasks.q_begin[chosen], tasks.q_end[chosen]
        k_begin, k_end = tasks.k_begin[chosen], tasks.k_end[chosen]
        q, k = q_end - q_begin, k_end - k_begin
        upload = _Upload(self._device)
        if phase is Phase.FORWARD:
            queries = (
                _in_place(q_begin, q_end) if self._gaps else self._own_rows(upload, q_begin, q)
            )
            keys, sums = _in_place(k_begin, k_end), None
        else:
            queries = self._own_rows(upload, q_begin, q)
            keys = self._own_rows(upload, k_begin, k)
            sums = gradient_blocks(tasks.dk_begin[chosen], k, keys.begin[:-1])
        written = None
        if queries.index is None and queries.span.stop - queries.span.start > q.sum():
            written = upload.rows(runs_to_rows(q_begin - queries.span.start, q))
        columns = upload.ints(
            [queries.begin, keys.begin, q, k, *((sums[0].ravel(), sums[1]) if sums else ())]
        )
        return Launch(
            q=queries.rows,
            written=written,
            k=keys.rows,
            cu_seqlens_q=columns[0],
            cu_seqlens_k=columns[1],
            seqused_q=columns[2],
            seqused_k=columns[3],
            max_seqlen_q=int(q.max()),
            max_seqlen_k=int(k.max()),
            n_keys=int(k.sum()),
            gradient_sum=GradientSum(columns[4].view(-1, 4), columns[5]) if sums else None,
        )

    def _own_rows(self, upload: _Upload, begin: Int64Array, length: Int64Array) -> _Placed:
        """Rows in which every task has a range of its own, in order: in place if they are so."""
        end = begin + length
        apart = bool((begin[1:] >= end[:-1]).all())
        total = int(length.sum())
        # Rows in gaps cost memory for accumulators, so few of them are let in.
        room = 2 * total if self._gaps else total
        if apart and end[-1] - begin[0] <= room:
            return _in_place(begin, end)
        index = upload.rows(runs_to_rows(begin, length))
        return _Placed(slice(0, total), index, np.append(exclusive_cumsum(length), total))


@dataclass(frozen=True, eq=False)
class _Placed:
    """Rows, and where each task begins in them, with the end of all at the end."""

    span: slice
    index: torch.Tensor | None
    begin: Int64Array

    @property
    def rows(self) -> Rows:
        return Rows(self.span, self.index)


def _in_place(begin: Int64Array, end: Int64Array) -> _Placed:
    """Tasks anywhere in the rows from the first to the last of them."""
    span = slice(int(begin.min()), int(end.max()))
    return _Placed(span, None, np.append(begin, span.stop) - span.start)


class _Upload:
    """Copies index columns to a device without waiting for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def rows(self, rows: Int64Array) -> torch.Tensor:
        """``rows`` as int64, which indexing wants."""
        return on_device(torch.from_numpy(rows), self._device)

    def ints(self, columns: Sequence[Int64Array]) -> list[torch.Tensor]:
        """``columns`` as int32, in one copy, each aligned to ALIGNMENT_INTS."""
        sizes = [-(-len(column) // ALIGNMENT_INTS) * ALIGNMENT_INTS for column in columns]
        host = torch.zeros(sum(sizes), dtype=torch.int32)
        for part, column in zip(host.split(sizes), columns, strict=True):
            part[: len(column)] = torch.from_numpy(column)
        device = on_device(host, self._device).split(sizes)
        return [part[: len(column)] for part, column in zip(device, columns, strict=True)]


def head_groups(
    num_heads: int, num_heads_kv: int, n_keys: int, workspace_keys: int
) -> list[HeadGroup]:
    """The groups in which a backward launch takes its heads, so that a task with more keys than the
    workspace is meant for needs no more memory than one that fits, as far as there are heads to
    divide.

    Args:
        num_heads, num_heads_kv: of the tasks.
        n_keys: of the launch, which only with a single task can be more than ``workspace_keys``.
        workspace_keys: see DEFAULT_WORKSPACE_KEYS.
    """
    wanted = min(-(-n_keys // workspace_keys), num_heads_kv)
    n_groups = next(n for n in range(wanted, num_heads_kv + 1) if num_heads_kv % n == 0)
    heads, heads_kv = num_heads // n_groups, num_heads_kv // n_groups
    return [
        (slice(i * heads, (i + 1) * heads), slice(i * heads_kv, (i + 1) * heads_kv))
        for i in range(n_groups)
    ]


def gradient_blocks(
    target_begin: Int64Array, length: Int64Array, source_begin: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """``blocks`` and ``shifts`` of a :class:`GradientSum`.

    Args:
        target_begin: ``[n_tasks]`` first row that a task adds to.
        length: ``[n_tasks]`` rows that it adds.
        source_begin: ``[n_tasks]`` its first row among the tasks' gradients.
    """
    target_end = target_begin + length
    edges = np.unique(np.concatenate([target_begin, target_end]))
    first = edges[:-1, None]
    interval, task = np.nonzero((target_begin <= first) & (first < target_end))
    shifts = (source_begin - target_begin)[task]
    bounds = np.searchsorted(interval, np.arange(len(edges)))
    # Every interval is cut into blocks; blocks to which no task adds are left out.
    n_blocks = -(-np.diff(edges) // SUM_ROWS)
    n_blocks[np.diff(bounds) == 0] = 0
    of = np.repeat(np.arange(len(n_blocks)), n_blocks)
    row = edges[of] + SUM_ROWS * (np.arange(len(of)) - exclusive_cumsum(n_blocks)[of])
    n_rows = np.minimum(SUM_ROWS, edges[of + 1] - row)
    return np.stack([row, n_rows, bounds[of], bounds[of + 1]], axis=1), shifts
