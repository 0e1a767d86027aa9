"""Collectives that are launched only once all their ranks have come to them.

A collective's kernel occupies a GPU until the last rank has launched its own. Meanwhile CUDA does
not load kernels on that GPU, nor free memory (``benchmarks.gpu.blocking_calls``). If the rank that
is awaited waits in its turn for rows from this rank's server, and the server is held up in such a
call, nobody goes on. With a barrier on the host before each launch, every kernel of a collective
that runs is one that all ranks are about to launch, whatever servers do.
"""

from __future__ import annotations

import zlib
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
    """Has the ranks of a collective of a wrapped model meet before it.

    To be made by all ranks together. Those of one group launch its collectives in one order anyway,
    or NCCL would hang, and so come to its barriers in one order. Ranks of other groups, such as the
    other stages of a pipeline, are not waited for.

    Args:
        timeout_seconds: how long a rank waits for the others before it gives up.

    Attributes:
        group: of all ranks, on the host.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timedelta(seconds=timeout_seconds)
        # A group of its own: over gloo, a barrier takes log2(ranks) rounds.
        self.group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=self._timeout)

    def meet(self, group: dist.ProcessGroup | None = None) -> None:
        """Returns when all ranks of ``group`` have come; None: all ranks.

        Raises:
            RuntimeError: a rank has not come in time, or has ended.
        """
        ranks = dist.get_process_group_ranks(group or self.group)
        if len(ranks) < dist.get_world_size():
            self._meet_some(ranks)
            return
        # dist.barrier would go by the default group's device, a GPU.
        options = dist.BarrierOptions()
        options.device = torch.device("cpu")
        self.group.barrier(options).wait()

    def _meet_some(self, ranks: list[int]) -> None:
        """A dissemination barrier: after k rounds each has heard, through others, of 2^k ranks.

        In messages, since ``new_group`` on some ranks alone names the group by how many groups a
        rank has, which need not be the same.
        """
        me, n = ranks.index(dist.get_rank()), len(ranks)
        # Barriers of two groups that share ranks may run at a time.
        tag = zlib.crc32(repr(ranks).encode()) >> 1
        distance = 1
        while distance < n:
            told, heard = torch.zeros(1, dtype=torch.uint8), torch.empty(1, dtype=torch.uint8)
            works = [
                dist.isend(told, ranks[(me + distance) % n], group=self.group, tag=tag),
                dist.irecv(heard, ranks[me - distance], group=self.group, tag=tag),
            ]
            for work in works:
                assert work is not None
                work.wait(self._timeout)
            distance *= 2

    def guard_sharded(self, module: FSDPModule) -> None:
        """Before what ``module``, but not its submodules, gathers and reduces."""
        module.set_custom_all_gather(_AllGather(self))  # type: ignore[arg-type]  # by its methods
        module.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def guard_replicated(self, module: DistributedDataParallel) -> None:
        """Before every sum of gradients of ``module``."""
        # A lambda, since DDP refuses hooks whose annotations are strings.
        module.register_comm_hook(
            module.process_group, lambda group, bucket: self._meet_and_reduce(group, bucket)
        )

    def _meet_and_reduce(
        self, group: dist.ProcessGroup, bucket: Any
    ) -> torch.futures.Future[torch.Tensor]:
        self.meet(group)
        return allreduce_hook(group, bucket)


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
        self._barriers.meet(group)
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
        self._barriers.meet(group)
        return _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
