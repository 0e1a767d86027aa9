"""The interface of a kernel: one call that runs a fused batch of CA-tasks, forward or backward.

Tensor names end in their dimensions' meaning as follows: q rows x heads x head dim; all tensors are
contiguous, on one device. Every kernel passes ``tests/unit/core_attention/kernel_conformance.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape

HIGH_PRIORITY: Final = -1
"""The priority of CUDA streams of core attention, above the default of 0."""


@dataclass(frozen=True, eq=False)
class TaskBatch:
    """The rows of each CA-task in a part's tensors; half-open row ranges.

    The same object serves every layer of a step, so a kernel may cache by identity what it derives
    from it (index tensors on the device, launch parameters). Under the causal mask, query i of a
    task with n queries and m keys sees keys ``[0, m - n + i]`` of the task's range, and of those
    the last ``window`` if there is a window; under the full mask all m. m >= n >= 1.

    Attributes:
        q_begin, q_end: ``[n_tasks]`` rows of q (and o, lse, do, delta, dq). Ranges of different
            tasks are disjoint, and may leave rows out; those must hold finite numbers, since
            kernels read whole tiles and multiply what they do not need by zero.
        k_begin, k_end: ``[n_tasks]`` rows of k and v. Tasks of one document share them.
        dk_begin: ``[n_tasks]`` first row of dk and dv that a task adds to; it adds to
            ``k_end - k_begin`` rows.
    """

    q_begin: Int64Array
    q_end: Int64Array
    k_begin: Int64Array
    k_end: Int64Array
    dk_begin: Int64Array

    def __len__(self) -> int:
        return len(self.q_begin)


@dataclass(frozen=True, eq=False)
class ForwardPart:
    """Tasks over one set of tensors; a call may fuse several parts.

    Attributes:
        q: ``[n_q, num_heads, head_dim]``.
        k: ``[n_k, num_heads_kv, head_dim]``.
        v: ``[n_k, num_heads_kv, head_dim_v]``.
        o: ``[n_q, num_heads, head_dim_v]`` output; only the rows of the tasks are written.
        lse: ``[n_q, num_heads]`` float32 output: natural log of the sum over keys of
            exp(score), where score is scale * q.k, softcapped if there is a softcap; only the rows
            of the tasks are written.
        tasks: which rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    o: torch.Tensor
    lse: torch.Tensor
    tasks: TaskBatch


@dataclass(frozen=True, eq=False)
class BackwardPart:
    """As :class:`ForwardPart`, for the backward pass.

    Attributes:
        q, k, v: as in the forward pass.
        do: ``[n_q, num_heads, head_dim_v]`` gradient of o.
        lse: ``[n_q, num_heads]`` float32, from the forward pass.
        delta: ``[n_q, num_heads]`` float32, row sums of do * o, less the gradient of lse if it
            has one.
        dq: ``[n_q, num_heads, head_dim]`` output in q's dtype; only the rows of the tasks are
            written.
        dk: ``[n_dk, num_heads_kv, head_dim]`` float32; the tasks' gradients are added to it, in a
            fixed order, so that equal calls give equal bits.
        dv: ``[n_dk, num_heads_kv, head_dim_v]`` float32, likewise.
        tasks: which rows.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    tasks: TaskBatch


class Kernel(Protocol):
    """Runs fused batches of CA-tasks. Calls come from one thread at a time, but for
    :meth:`prepare`, which any thread may call at any time."""

    @property
    def name(self) -> str:
        """Names the implementation in logs, profiles and errors."""

    def check(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Raises ValueError, naming the field and what is supported, if it cannot run ``shape``
        under ``rule``."""

    def warm_up(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Compiles and loads what calls with ``shape`` under ``rule`` need, so that no tick waits
        for it."""

    def prepare(self, tasks: TaskBatch, phase: Phase) -> None:
        """Derives ahead what calls with ``tasks`` need, so that the first one does not wait."""

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        """Writes o and lse of every task of ``parts``; ``scale`` multiplies q.k before softmax."""

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        """Writes dq and adds to dk and dv for every task of ``parts``."""

    def synchronize(self) -> None:
        """Returns once everything that was launched has finished."""
