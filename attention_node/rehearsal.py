"""A small step before the first real one, through all kernels that serving launches.

CUDA loads a kernel when it is launched for the first time, and that waits until whatever runs on
the device has ended. In place, what runs may be a collective, which waits for a rank that waits for
this very server. So everything is launched once while nobody waits.
"""

from __future__ import annotations

import numpy as np
import torch

from attention_node.machine.tick import TickMachine
from attention_node.open_tick import OpenTick, Source
from attention_node.tick_route import derive_tick_route
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.checksum import seal, verify
from core_attention.kernels.protocol import Kernel
from core_attention.kernels.row_dots import row_dots
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.message import reply_layout, request_layout
from core_attention.message_rows import message_rows
from core_attention.message_views import Tensors, message_views
from core_attention.plan import Plan, PlanServer
from core_attention.routing import PairRoute
from core_attention.shape import AttentionShape
from core_attention.tick import Tick

LOCAL_RANK, REMOTE_RANK = 0, 1
HERE, ELSEWHERE = 0, 1


def rehearse(kernel: Kernel, shape: AttentionShape, device: torch.device) -> None:
    """Runs a small step on a GPU; returns when it is done. A CPU has no kernels to load.

    Args:
        kernel: runs the tasks; warm.
        shape: of the job's core attention.
        device: where it will be served.
    """
    if device.type != "cpu":
        run_small_step(kernel, shape, device)


def run_small_step(kernel: Kernel, shape: AttentionShape, device: torch.device) -> None:
    """Serves two ranks, one of them in place, for a few rows of zeros."""
    plan = small_plan()
    with torch.no_grad():
        for nano_batch in range(plan.manifest.n_nano_batches):
            for phase in Phase:
                rehearse_tick(kernel, plan, nano_batch, phase, shape, device)
    message = torch.zeros(4096, dtype=torch.uint8, device=device)
    seal(message, 0, bytes(32))
    verify(message, 0, bytes(32))
    kernel.synchronize()


def small_plan() -> Plan:
    """Two ranks, whose server HERE is the local rank's own, with all that tasks can differ in.

    In nano-batch 0 documents are whole, or span both ranks, so that their keys are copied together,
    and some queries in between are for ELSEWHERE. In 1 and 2 those in between are most of them, so
    that the others are copied together; the rows of 2 are few, for which PyTorch has other kernels.
    In 3 each rank has a single row.
    """
    segments = {
        LOCAL_RANK: (
            (Segment(1, 384, 0, 384), Segment(2, 256, 0, 96), Segment(3, 1, 0, 1)),
            (Segment(5, 1024, 0, 1024),),
            (Segment(7, 24, 0, 24),),
            (Segment(9, 1, 0, 1),),
        ),
        REMOTE_RANK: (
            (Segment(2, 256, 96, 160), Segment(4, 192, 0, 192)),
            (Segment(6, 128, 0, 128),),
            (Segment(8, 8, 0, 8),),
            (Segment(10, 1, 0, 1),),
        ),
    }
    tasks = [
        # document, query range, server
        (0, 0, 128, HERE),
        (0, 128, 160, ELSEWHERE),
        (0, 160, 384, HERE),
        (1, 0, 96, HERE),
        (1, 96, 256, HERE),
        (2, 0, 1, HERE),
        (3, 0, 64, ELSEWHERE),
        (3, 64, 192, HERE),
        (4, 0, 64, HERE),
        (4, 64, 960, ELSEWHERE),
        (4, 960, 1024, HERE),
        (5, 0, 128, HERE),
        (6, 0, 4, HERE),
        (6, 4, 20, ELSEWHERE),
        (6, 20, 24, HERE),
        (7, 0, 4, HERE),
        (7, 4, 8, HERE),
        (8, 0, 1, HERE),
        (9, 0, 1, HERE),
    ]
    manifests = [RankManifest(0, rank, nano_batches) for rank, nano_batches in segments.items()]
    table = TaskTable(*np.array(tasks, dtype=np.int64).T)
    return Plan(
        manifest=Manifest.merge(manifests, len(manifests)),
        epoch=0,
        servers=(PlanServer("here", LOCAL_RANK, ""), PlanServer("elsewhere", None, "")),
        forward=table,
        backward=table,
        mask=MaskKind.CAUSAL,
        planner="rehearsal",
        reason="all that tasks can differ in",
    )


def rehearse_tick(
    kernel: Kernel,
    plan: Plan,
    nano_batch: int,
    phase: Phase,
    shape: AttentionShape,
    device: torch.device,
) -> None:
    """Runs one tick of server HERE on rows of zeros, with what its ranks do for it.

    Args:
        kernel: runs the tasks.
        plan: its server HERE is that of LOCAL_RANK.
        nano_batch, phase: which tick.
        shape: of the core attention.
        device: where everything lives.
    """
    route = derive_tick_route(plan, HERE, nano_batch, phase, LOCAL_RANK)
    machine = TickMachine(
        Tick(plan.step, 0, nano_batch, phase),
        route.outline(phase, owed=frozenset(), message_bytes={}),
    )
    tick = OpenTick(machine, route, shape, shape.rule, 1.0, device, on_closed=_nothing)
    n_rows = plan.manifest.tokens_per_rank(nano_batch).tolist()
    ranks = {
        rank: _RehearsedRank(n_rows[rank], phase, pair, shape, device)
        for rank, pair in sorted(route.pairs.items())
    }
    ready = [i for rank, each in ranks.items() for i in tick.arrive(rank, each.source())]
    if phase is Phase.FORWARD:
        kernel.forward([tick.forward_part(i) for i in ready], 1.0, shape.rule)
    else:
        kernel.backward([tick.backward_part(i) for i in ready], 1.0, shape.rule)
    for i in ready:
        tick.part_done(i)
    for each in ranks.values():
        each.take_in()


class _RehearsedRank:
    """A rank's side of a tick: the local one's own tensors, or messages."""

    def __init__(
        self,
        n_rows: int,
        phase: Phase,
        pair: PairRoute,
        shape: AttentionShape,
        device: torch.device,
    ) -> None:
        self._local = pair.rank == LOCAL_RANK
        self._request = request_layout(pair, shape, phase)
        self._reply = reply_layout(pair, shape, phase)
        self._kv_rows = torch.from_numpy(pair.kv_rows).to(device)
        self._rows = message_rows(
            self._request, self._reply, torch.from_numpy(pair.q_rows).to(device), self._kv_rows
        )
        packed = {
            section.name: torch.zeros(
                (n_rows, *section.shape[1:]), dtype=getattr(torch, section.dtype), device=device
            )
            for section in (*self._request.sections, *self._reply.sections)
        }
        self._gradients: Tensors = {
            name: packed.pop(name).float() for name in ("dk", "dv") if name in packed
        }
        self._partial = {
            name: rows.new_empty((pair.n_kv_rows, *rows.shape[1:]))
            for name, rows in self._gradients.items()
        }
        self._packed: Tensors = packed
        for rows in (*packed.values(), *self._gradients.values()):
            # As groups of heads are put together and taken apart.
            torch.cat([rows, rows], dim=1).chunk(2, dim=1)[0].contiguous()
        self._reply_message = torch.zeros(self._reply.nbytes, dtype=torch.uint8, device=device)
        if phase is Phase.BACKWARD:
            row_dots(packed["do"], packed["do"])

    def source(self) -> Source:
        """The rank's rows, as it hands them in."""
        if self._local:
            inputs, outputs = self._packed, {**self._packed, **self._partial}
        else:
            request = torch.zeros(
                self._request.nbytes, dtype=torch.uint8, device=self._reply_message.device
            )
            self._rows.pack(request, self._packed)
            inputs = message_views(request, self._request)
            outputs = message_views(self._reply_message, self._reply)
        return Source(inputs=inputs, outputs=outputs, reply=_nothing, release=_nothing, fail=_fail)

    def take_in(self) -> None:
        """Takes the results to their rows."""
        if not self._local:
            self._rows.unpack(self._reply_message, self._packed, self._gradients)
            return
        for name, partial in self._partial.items():
            self._gradients[name].index_add_(0, self._kv_rows, partial)


def _nothing(*_: object) -> None:
    pass


def _fail(error: BaseException) -> None:
    raise error
