"""FlashAttention-4 (``flash_attn.cute``), for Hopper and datacentre Blackwell GPUs.

Tasks of one document share one copy of K and V in the forward pass. In the backward pass the
library computes delta, the row sums of dO * O, itself; but it subtracts the gradient of the
log-sum-exp from it (``dlse``), so an output of zeros and ``dlse = -delta`` give it ours, exactly.

It reads whole tiles: rows beside a task's are multiplied by zero, so they must hold finite numbers.

Its backward pass counts head dims in 16s in one place and in 32s in another. Where the two differ,
as for 80 dims, its gradients are wrong, and nothing says so (4.0.0b36, H100). So rows are widened
there to a multiple of 32 dims by zeros, which change no product; values get as many dims as keys.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import logging
import os
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from core_attention.ca_task import MaskKind, Phase
from core_attention.kernels.gpu_launches import (
    DEFAULT_WORKSPACE_KEYS,
    HeadGroup,
    Launch,
    LaunchCache,
)
from core_attention.kernels.gpu_shapes import (
    check_device,
    check_dtype,
    part_shape,
    warm_up_parts,
)
from core_attention.kernels.launcher import require_launcher
from core_attention.kernels.protocol import HIGH_PRIORITY, BackwardPart, ForwardPart, TaskBatch
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape

logger = logging.getLogger(__name__)

INSTALL = "pip install 'distca[fa4]' (flash-attn-4 4.0.0b36 or later)"

LONG = 1024
"""The least longest task that the library gets to know: it compiles apart for batches of short
ones, and serving must not meet a configuration that was not warmed up."""

_ARGUMENTS = {
    "_flash_attn_fwd": {"seqused_q", "seqused_k", "out", "lse", "causal", "softcap"},
    "_flash_attn_bwd": {"seqused_q", "seqused_k", "dq", "dk", "dv", "dlse", "deterministic"},
}

HOPPER_MAJOR = 9

DIMS_STEP = 32
LATENT_DIMS = (192, 128)
"""The only different dims of keys and values that the library has kernels for on every device."""

SMALL_HEAD_DIM = 128
"""Above it, Blackwell has kernels of their own."""

_HEAD_DIMS = {HOPPER_MAJOR: 256, 10: 128, 11: 128}
"""Largest head dim by major compute capability, both passes (192 with 128 apart)."""


_COMPILING: Final = threading.Lock()
"""The library's compiler keeps state of its own a process: two threads at it fail."""


class Fa4Kernel:
    """Runs CA-tasks on one GPU in bfloat16 or float16; launches are asynchronous, on the calling
    thread's current stream.

    dQ, dK and dV of a task are summed by atomic adds in float32 unless ``deterministic``; the dK
    and dV of different tasks always in a fixed order. The output and its log-sum-exp have equal
    bits in equal calls, and whether a document is cut or not.

    Args:
        device: a CUDA device of compute capability 9, 10 or 11.
        deterministic: whether gradients have equal bits in equal calls, too. On an H200 the
            backward pass is then 7% slower with planned batches, but 2 to 5 times slower with tasks
            of 1024 queries and fewer that have tens of thousands of keys.
        workspace_keys: see :data:`core_attention.kernels.gpu_launches.DEFAULT_WORKSPACE_KEYS`.

    Raises:
        ImportError, LauncherError, ValueError: it cannot run here.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        deterministic: bool = False,
        workspace_keys: int = DEFAULT_WORKSPACE_KEYS,
    ) -> None:
        self._capability = check_device("fa4", device, tuple(_HEAD_DIMS))
        self._library = _import_library()
        require_launcher()
        from core_attention.kernels.gpu_gradients import add_task_gradients

        self._add_task_gradients = add_task_gradients
        self._device = device
        self._deterministic = deterministic
        self._launches = LaunchCache(device, gaps=True, workspace_keys=workspace_keys)
        self._zero_rows: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}
        self._warm: set[tuple[AttentionShape, ScoreRule]] = set()
        self._second_queue = torch.cuda.Stream(device, HIGH_PRIORITY)

    @property
    def name(self) -> str:
        """See :class:`core_attention.kernels.protocol.Kernel`."""
        return "fa4"

    def check(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Raises ValueError for a dtype, head dims or a softcap that it cannot run."""
        check_shape(shape, self._capability, rule)

    def warm_up(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Compiles everything that calls with ``shape`` under ``rule`` need; seconds to a minute,
        unless the compiled kernels are found on disk. Calls that are not warm do it first."""
        if (shape, rule) in self._warm:
            return
        self.check(shape, rule)
        begin = time.perf_counter()
        forward, backward = warm_up_parts(shape, self._device)
        with _COMPILING, torch.cuda.device(self._device), torch.no_grad():
            self._run_forward([forward], 1.0, rule)
            for workspace_keys in (None, 1):
                self._run_backward(backward, 1.0, rule, workspace_keys)
        self.synchronize()
        self._warm.add((shape, rule))
        logger.info(
            "kernel fa4 is ready for %s, %s, after %.1f s",
            shape,
            rule,
            time.perf_counter() - begin,
        )

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        """Writes o and lse of every task of ``parts``."""
        for part in parts:
            self.warm_up(part_shape(part), rule)
        with torch.cuda.device(self._device), torch.no_grad():
            self._run_forward(parts, scale, rule)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        """Writes dq and adds to dk and dv for every task of ``parts``."""
        for part in parts:
            self.warm_up(part_shape(part), rule)
        with torch.cuda.device(self._device), torch.no_grad():
            for part in parts:
                self._run_backward(part, scale, rule)

    def prepare(self, tasks: TaskBatch, phase: Phase) -> None:
        """Derives the launches of ``tasks`` and uploads their index tensors."""
        self._launches.prepare(tasks, phase)

    def synchronize(self) -> None:
        """Returns once what was launched on the current stream has finished."""
        torch.cuda.current_stream(self._device).synchronize()

    def _run_forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule) -> None:
        """All launches, those with the longest tiles first, on two queues: so that one of short
        tiles fills the device while one of long ones runs out (4% of a call of milliseconds, 1% of
        one of tens; the backward pass gains nothing from it)."""
        work = [
            (part, launch)
            for part in parts
            for launch in self._launches.launches(part.tasks, Phase.FORWARD)
        ]
        work.sort(key=lambda item: item[1].max_seqlen_k, reverse=True)
        current = torch.cuda.current_stream()
        self._second_queue.wait_stream(current)
        for (part, launch), queue in zip(work, itertools.cycle((current, self._second_queue))):
            with torch.cuda.stream(queue):
                self._forward(part, launch, scale, rule)
        current.wait_stream(self._second_queue)

    def _run_backward(
        self, part: BackwardPart, scale: float, rule: ScoreRule, workspace_keys: int | None = None
    ) -> None:
        for launch, groups in self._launches.backward_launches(part, workspace_keys):
            self._backward(part, launch, groups, scale, rule)

    def _forward(self, part: ForwardPart, launch: Launch, scale: float, rule: ScoreRule) -> None:
        shape = part_shape(part)
        dims, dims_v = library_dims(shape, self._capability, Phase.FORWARD)
        q = _widened(launch.q.take(part.q), dims)
        lse = torch.empty((q.shape[1], len(q)), dtype=torch.float32, device=q.device)
        target = launch.q.take(part.o)
        is_wide = dims_v != shape.head_dim_v
        out = q.new_empty((*target.shape[:2], dims_v)) if is_wide else target
        self._library._flash_attn_fwd(
            q,
            _widened(launch.k.take(part.k), dims),
            _widened(launch.k.take(part.v), dims_v),
            softmax_scale=scale,
            out=out,
            lse=lse,
            **_call_arguments(launch, rule),
        )
        if is_wide:
            _copy_written(target, out[..., : shape.head_dim_v], launch)
        _copy_written(launch.q.take(part.lse), lse.t(), launch)

    def _backward(
        self,
        part: BackwardPart,
        launch: Launch,
        groups: Sequence[HeadGroup],
        scale: float,
        rule: ScoreRule,
    ) -> None:
        shape = part_shape(part)
        dims, dims_v = library_dims(shape, self._capability, Phase.BACKWARD)
        q, do = _widened(launch.q.take(part.q), dims), _widened(launch.q.take(part.do), dims_v)
        k, v = _widened(launch.k.take(part.k), dims), _widened(launch.k.take(part.v), dims_v)
        lse = launch.q.take(part.lse).t().contiguous()
        dlse = torch.empty_like(lse)
        torch.neg(launch.q.take(part.delta).t(), out=dlse)
        target = launch.q.take(part.dq)
        dq = target if dims == shape.head_dim else torch.empty_like(q)
        assert launch.gradient_sum is not None
        for heads, heads_kv in groups:
            dk, dv = torch.empty_like(k[:, heads_kv]), torch.empty_like(v[:, heads_kv])
            self._library._flash_attn_bwd(
                q[:, heads],
                k[:, heads_kv],
                v[:, heads_kv],
                self._zero_row(do[:, heads]),
                do[:, heads],
                lse[heads],
                softmax_scale=scale,
                dq=dq[:, heads],
                dk=dk,
                dv=dv,
                dlse=dlse[heads],
                deterministic=self._deterministic,
                **_call_arguments(launch, rule),
            )
            for total, term in ((part.dk, dk), (part.dv, dv)):
                self._add_task_gradients(
                    total[:, heads_kv], _narrowed(term, total.shape[2]), launch.gradient_sum
                )
        if dims != shape.head_dim:
            _copy_written(target, dq[..., : shape.head_dim], launch)
        if launch.q.index is not None:
            launch.q.put(part.dq, target)

    def _zero_row(self, like: torch.Tensor) -> torch.Tensor:
        """An output of zeros, shaped as ``like``; one row of memory."""
        key = (like.shape[1:], like.dtype)
        if key not in self._zero_rows:
            self._zero_rows[key] = like.new_zeros((1, *like.shape[1:]))
        return self._zero_rows[key].expand_as(like)


def _widened(rows: torch.Tensor, dims: int) -> torch.Tensor:
    """``[rows, heads, dims]`` with zeros behind what is there."""
    if rows.shape[2] == dims:
        return rows
    return torch.nn.functional.pad(rows, (0, dims - rows.shape[2]))


def _narrowed(rows: torch.Tensor, dims: int) -> torch.Tensor:
    return rows if rows.shape[2] == dims else rows[..., :dims].contiguous()


def _copy_written(target: torch.Tensor, rows: torch.Tensor, launch: Launch) -> None:
    """The rows of the launch's tasks; those between them keep what they hold."""
    if launch.written is None:
        target.copy_(rows)
    else:
        target.index_copy_(0, launch.written, rows.index_select(0, launch.written))


def library_dims(
    shape: AttentionShape, capability: tuple[int, int], phase: Phase
) -> tuple[int, int]:
    """Head dims of q and k, and of v, in the calls of the library: as they are, or wider."""
    dims = (shape.head_dim, shape.head_dim_v)
    if dims == LATENT_DIMS:
        is_one_wide = phase is Phase.BACKWARD and capability[0] == HOPPER_MAJOR
        wide = max(dims) if is_one_wide and shape.group_size > 1 else 0
    elif phase is Phase.FORWARD and dims[0] == dims[1]:
        wide = 0
    else:
        wide = -(-max(dims) // DIMS_STEP) * DIMS_STEP
    return (wide, wide) if wide else dims


def check_shape(
    shape: AttentionShape, capability: tuple[int, int], rule: ScoreRule = PLAIN
) -> None:
    """Checks that the kernel can run ``shape`` under ``rule`` on a GPU of ``capability``."""
    check_dtype("fa4", shape)
    dims = (shape.head_dim, shape.head_dim_v)
    most = _HEAD_DIMS[capability[0]]
    if dims != LATENT_DIMS and not all(8 <= dim <= most and dim % 8 == 0 for dim in dims):
        raise ValueError(
            f"head_dim {dims[0]} with head_dim_v {dims[1]}: on compute capability "
            f"{capability[0]}.{capability[1]} fa4 supports multiples of 8 up to {most}, and 192 "
            "with 128"
        )
    if max(dims) > most and shape.group_size > 1:
        raise ValueError(
            f"head_dim {dims[0]} with head_dim_v {dims[1]}: on compute capability "
            f"{capability[0]}.{capability[1]} fa4 supports them where num_heads_kv equals "
            f"num_heads, not {shape.num_heads_kv} and {shape.num_heads}"
        )
    if rule.softcap and capability[0] != HOPPER_MAJOR and max(dims) > SMALL_HEAD_DIM:
        raise ValueError(
            f"softcap is {rule.softcap:g} with head_dim {dims[0]}: on a GPU of compute capability "
            f"{capability[0]}.{capability[1]} the fa4 kernel supports a softcap up to head_dim "
            f"{SMALL_HEAD_DIM}"
        )


def _call_arguments(launch: Launch, rule: ScoreRule) -> dict[str, Any]:
    # An unbounded side of a window is None: -1 would hide everything.
    return {
        "causal": rule.mask is MaskKind.CAUSAL,
        "window_size_left": None if rule.window is None else rule.window - 1,
        "window_size_right": None if rule.window is None else 0,
        "softcap": rule.softcap,
        "cu_seqlens_q": launch.cu_seqlens_q,
        "cu_seqlens_k": launch.cu_seqlens_k,
        "seqused_q": launch.seqused_q,
        "seqused_k": launch.seqused_k,
        "max_seqlen_q": max(launch.max_seqlen_q, LONG),
        "max_seqlen_k": max(launch.max_seqlen_k, LONG),
    }


def _import_library() -> Any:
    """The library, with its compiled kernels kept on disk unless the user has set otherwise."""
    # It reads both when it is imported, and has no other way to set them.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    directory = Path("~/.cache/distca/fa4").expanduser()
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
    try:
        library = importlib.import_module("flash_attn.cute.interface")
    except ImportError as error:
        raise ImportError(f"flash_attn.cute cannot be imported ({error}): {INSTALL}") from error
    # The library's own arguments, which its compiler handles all the same.
    warnings.filterwarnings("ignore", "Argument aux_data .* cannot be converted", UserWarning)
    for function, arguments in _ARGUMENTS.items():
        known = inspect.signature(getattr(library, function, lambda: None)).parameters
        if missing := sorted(arguments - known.keys()):
            raise ImportError(
                f"this flash_attn.cute is another version: {function} lacks {missing}: {INSTALL}"
            )
    return library
