"""FlashAttention-2 as PyTorch has it built in, for NVIDIA GPUs from Ampere on.

Tasks of one document share one copy of K and V in the forward pass. PyTorch's operators have
neither lengths of queries apart from offsets nor any lengths of keys in the backward pass, so rows
are copied together where they have gaps. The backward operator computes delta, the row sums of
dO * O, from an output; it gets one that yields ours.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from core_attention.kernels.protocol import BackwardPart, ForwardPart, TaskBatch
from core_attention.score_rule import PLAIN, ScoreRule
from core_attention.shape import AttentionShape

MAJORS = (8, 9, 10, 11, 12)

SMALL_CAPABILITIES = ((8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs with 100 KB of shared memory, too little for the backward pass above SMALL_HEAD_DIM."""

MAX_HEAD_DIM, SMALL_HEAD_DIM = 256, 192

LONG = 2
"""The least longest task that the operator gets to know: it lays tasks of one query out another
way."""


class Fa2Kernel:
    """Runs CA-tasks on one GPU in bfloat16 or float16; launches are asynchronous, on the calling
    thread's current stream.

    Args:
        device: a CUDA device of compute capability 8.0 or more.
        deterministic: whether gradients have equal bits in equal calls; the operators then need
            ``torch.use_deterministic_algorithms(True)``, which is left to the process to set.
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
        self._capability = check_device("fa2", device, MAJORS)
        if deterministic and not torch.are_deterministic_algorithms_enabled():
            raise ValueError(
                "deterministic is True; the fa2 kernel then needs PyTorch's process-wide setting: "
                "call torch.use_deterministic_algorithms(True) first"
            )
        require_launcher()
        from core_attention.kernels import gpu_gradients

        self._gradients = gpu_gradients
        self._device = device
        self._launches = LaunchCache(device, gaps=False, workspace_keys=workspace_keys)
        # Seed and offset of dropout, which is off.
        self._random_state = torch.zeros(2, dtype=torch.uint64, device=device)
        self._unused = torch.empty(0, device=device)

    @property
    def name(self) -> str:
        """See :class:`core_attention.kernels.protocol.Kernel`."""
        return "fa2"

    def check(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Raises ValueError for a dtype, head dims or a softcap that it cannot run."""
        check_shape(shape, self._capability, rule)

    def warm_up(self, shape: AttentionShape, rule: ScoreRule = PLAIN) -> None:
        """Compiles what calls with ``shape`` need: small kernels of our own, in a second or two."""
        self.check(shape, rule)
        forward, backward = warm_up_parts(shape, self._device)
        self.forward([forward], 1.0, rule)
        for workspace_keys in (None, 1):
            self._run_backward(backward, 1.0, rule, workspace_keys)
        self.synchronize()

    def forward(self, parts: Sequence[ForwardPart], scale: float, rule: ScoreRule = PLAIN) -> None:
        """Writes o and lse of every task of ``parts``."""
        with torch.cuda.device(self._device), torch.no_grad():
            for part in parts:
                self.check(part_shape(part), rule)
                for launch in self._launches.launches(part.tasks, Phase.FORWARD):
                    self._forward(part, launch, scale, rule)

    def backward(
        self, parts: Sequence[BackwardPart], scale: float, rule: ScoreRule = PLAIN
    ) -> None:
        """Writes dq and adds to dk and dv for every task of ``parts``."""
        for part in parts:
            self._run_backward(part, scale, rule)

    def prepare(self, tasks: TaskBatch, phase: Phase) -> None:
        """Derives the launches of ``tasks`` and uploads their index tensors."""
        self._launches.prepare(tasks, phase)

    def synchronize(self) -> None:
        """Returns once what was launched on the current stream has finished."""
        torch.cuda.current_stream(self._device).synchronize()

    def _run_backward(
        self, part: BackwardPart, scale: float, rule: ScoreRule, workspace_keys: int | None = None
    ) -> None:
        with torch.cuda.device(self._device), torch.no_grad():
            self.check(part_shape(part), rule)
            for launch, groups in self._launches.backward_launches(part, workspace_keys):
                self._backward(part, launch, groups, scale, rule)

    def _forward(self, part: ForwardPart, launch: Launch, scale: float, rule: ScoreRule) -> None:
        o, lse, *_ = torch.ops.aten._flash_attention_forward(
            launch.q.take(part.q),
            launch.k.take(part.k),
            launch.k.take(part.v),
            launch.cu_seqlens_q,
            launch.cu_seqlens_k,
            max(launch.max_seqlen_q, LONG),
            launch.max_seqlen_k,
            0.0,
            rule.mask is MaskKind.CAUSAL,
            False,
            scale=scale,
            seqused_k=launch.seqused_k,
            **_window(rule),
        )
        launch.q.put(part.o, o)
        launch.q.put(part.lse, lse.t())

    def _backward(
        self,
        part: BackwardPart,
        launch: Launch,
        groups: Sequence[HeadGroup],
        scale: float,
        rule: ScoreRule,
    ) -> None:
        q, do = launch.q.take(part.q), launch.q.take(part.do)
        k, v = launch.k.take(part.k), launch.k.take(part.v)
        o = self._gradients.surrogate_output(do, launch.q.take(part.delta))
        lse = launch.q.take(part.lse).t().contiguous()
        assert launch.gradient_sum is not None
        for heads, heads_kv in groups:
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                do[:, heads],
                q[:, heads],
                k[:, heads_kv],
                v[:, heads_kv],
                o[:, heads],
                lse[heads],
                launch.cu_seqlens_q,
                launch.cu_seqlens_k,
                max(launch.max_seqlen_q, LONG),
                launch.max_seqlen_k,
                0.0,
                rule.mask is MaskKind.CAUSAL,
                self._random_state,
                self._unused,
                scale=scale,
                **_window(rule),
            )
            launch.q.put(part.dq[:, heads], dq)
            for total, term in ((part.dk, dk), (part.dv, dv)):
                self._gradients.add_task_gradients(total[:, heads_kv], term, launch.gradient_sum)


def check_shape(
    shape: AttentionShape, capability: tuple[int, int], rule: ScoreRule = PLAIN
) -> None:
    """Checks that the kernel can run ``shape`` under ``rule`` on a GPU of ``capability``."""
    check_dtype("fa2", shape)
    if rule.softcap:
        raise ValueError(
            f"softcap is {rule.softcap:g}; the fa2 kernel supports none (the fa4 kernel does, on "
            "Hopper and Blackwell)"
        )
    if shape.head_dim != shape.head_dim_v:
        raise ValueError(
            f"head_dim {shape.head_dim} with head_dim_v {shape.head_dim_v}: the fa2 kernel "
            "supports equal head dims only"
        )
    most = SMALL_HEAD_DIM if capability in SMALL_CAPABILITIES else MAX_HEAD_DIM
    if shape.head_dim % 8 or shape.head_dim > most:
        raise ValueError(
            f"head_dim is {shape.head_dim}; the fa2 kernel supports multiples of 8 up to {most} on "
            f"a GPU of compute capability {capability[0]}.{capability[1]}"
        )


def _window(rule: ScoreRule) -> dict[str, int]:
    """The operators' arguments for a window. Without one they are left out."""
    return (
        {} if rule.window is None else {"window_size_left": rule.window - 1, "window_size_right": 0}
    )
