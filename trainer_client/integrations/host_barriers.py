"""Collectives that are launched only once all ranks have come to them.

A collective's kernel occupies a GPU until the last rank has launched its own. Meanwhile CUDA does
not load kernels on that GPU, nor free memory (``benchmarks.gpu.blocking_calls``). If the rank that
is awaited waits in its turn for rows from this rank's server, and the server is held up in such a
call, nobody goes on. With a barrier on the host before each launch, every kernel of a collective
that runs is one that all ranks are about to launch, whatever servers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

# Named all_gather_into_tensor and reduce_scatter_tensor before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class HostBarriers:
    """Has all ranks meet before the collectives of a wrapped model.

    To be made by all ranks together. They launch collectives in one order anyway, or NCCL would
    hang, and so come to the barriers in one order.

    Args:
        timeout_seconds: how long a rank waits for the others before it gives up.

    Attributes:
        group: of all ranks, on the host.
    """

    def __init__(self, timeout_seconds: float) -> None:
        # A group of its own: over gloo, a barrier takes log2(ranks) rounds.
        self.group: dist.ProcessGroup = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds)
        )

    def meet(self) -> None:
        """Returns when all ranks have come.

        Raises:
            RuntimeError: a rank has not come in time, or has ended.
        """
        # dist.barrier would go by the default group's device, a GPU.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self.group.barrier(options).wait()

    def guard_sharded(self, module: FSDPModule) -> None:
        """Before what ``module``, but not its submodules, gathers and reduces."""
        module.set_custom_all_gather(_AllGather(self))  # type: ignore[arg-type]  # by its methods
        module.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def guard_replicated(self, module: DistributedDataParallel) -> None:
        """Before every sum of gradients of ``module``."""
        # A lambda, since DDP refuses hooks whose annotations are strings.
        module.register_comm_hook(None, lambda _, bucket: self._meet_and_reduce(bucket))

    def _meet_and_reduce(self, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.meet()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]  # None: the default group


class _Allocating:
    """Collectives of FSDP2 also say where their results go: anywhere."""

    def __init__(self, barriers: HostBarriers) -> None:
        self._barriers = barriers

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        self._barriers.meet()
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Allocating):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Any:
        self._barriers.meet()
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
