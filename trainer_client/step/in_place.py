"""The in-place server: a trainer's own attention server, in its process and on its device."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import torch

from attention_node.executor import Executor, KernelCall
from attention_node.load_meter import LoadMeter
from attention_node.metrics import NodeMetrics
from attention_node.rehearsal import rehearse
from attention_node.tick_server import Host, TickServer
from core_attention.cost_model import CostProfile
from core_attention.kernels.select import select_kernel
from core_attention.profiling import device_name, load_or_measure
from core_attention.shape import AttentionShape
from data_plane.buffer_pool import BufferPool
from distca.machine_errors import using
from distca.v1 import membership_pb2


class InPlaceServer:
    """An executor and a tick server for one rank.

    A server that stands by is used only when no attention node can be: nothing is balanced then, so
    it measures no profile, and it compiles its kernels when they are first wanted.

    Args:
        server_id: its name in plans.
        rank: the rank whose process it shares.
        shape: of the job's core attention.
        windows: that its layers have, beside none.
        device: of the trainer.
        pool: message buffers.
        host: the process, as its server calls it.
        standby: it stands by.
        profile_dir: where the cost profile is cached.
        metrics: of the server.
        moved_bytes: sent and received by the process so far.
        stalled_seconds: how long the process's data plane has been held up.
        on_call: called after each kernel call.

    Attributes:
        profile: its measured kernel cost; None if it stands by.
        device_name: for example ``"cpu"`` or ``"NVIDIA H200"``.
    """

    def __init__(
        self,
        server_id: str,
        rank: int,
        shape: AttentionShape,
        windows: Collection[int],
        device: torch.device,
        pool: BufferPool,
        host: Host,
        *,
        standby: bool = False,
        profile_dir: Path,
        metrics: NodeMetrics,
        moved_bytes: Callable[[], int],
        stalled_seconds: Callable[[], float],
        on_call: Callable[[KernelCall], None],
    ) -> None:
        kernel = select_kernel(device)
        kernel.check(shape, shape.rule)
        self.profile: CostProfile | None = None
        if not standby:
            for window in {0, *windows}:
                kernel.warm_up(shape, replace(shape.rule, window=window or None))
            rehearse(kernel, shape, device)
            with using("profile_dir", profile_dir):
                self.profile = load_or_measure(profile_dir, kernel, shape, device)
        self.device_name = device_name(device)

        def kernel_called(call: KernelCall) -> None:
            metrics.kernel_called(call)
            on_call(call)

        self._executor = Executor(kernel, device, on_call=kernel_called)
        self.ticks = TickServer(server_id, self._executor, pool, host, metrics, local_rank=rank)
        self._meter = LoadMeter(self._executor, self.ticks, pool, moved_bytes, stalled_seconds)

    def load(self) -> membership_pb2.ServerLoad:
        """Its load since the last call; of one thread at a time."""
        return self._meter.read()

    def close(self) -> None:
        """Ends every job and the executor's thread."""
        self.ticks.close()
        self._executor.close()
