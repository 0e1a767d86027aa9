"""A step while it runs, as the training loop sees it: its calls of core attention, what they wait
for, and what was measured. What becomes of its ticks is decided in :mod:`trainer_client.machine`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Protocol
from weakref import WeakSet

import numpy as np
import torch

from attention_node.served_job import JobDescription
from core_attention.ca_task import MaskKind, Phase
from core_attention.plan import Plan
from core_attention.tick import Tick
from distca.contract.server_loss import LossCause
from trainer_client.errors import SessionError
from trainer_client.link.planned_step import PlannedStep
from trainer_client.machine.outlines import LaneOutline
from trainer_client.machine.step import StepMachine
from trainer_client.metrics import OWN_PROCESS, ServedTasks, TickWait
from trainer_client.step.exchanges import Routes
from trainer_client.step.handed_over import HandedOver
from trainer_client.step.replies import Tensors
from trainer_client.step.sent_tick import SentTick
from trainer_client.step.step_report import DeviceWait, StepReport, TraceEvent


class Ticks(Protocol):
    """A sender of a step's ticks, which also waits for them; thread-safe.

    Attributes:
        lock: guards the lanes of running steps.
    """

    lock: threading.Condition

    def send(
        self,
        running: RunningStep,
        tick: Tick,
        inputs: Tensors,
        outputs: Tensors,
        carried: Tensors,
        *,
        copies_keys: bool,
    ) -> SentTick:
        """Sends this rank's part of ``tick`` to every server, or keeps it until a plan is in force;
        returns at once.

        Args:
            running: the step.
            tick: which exchange.
            inputs: q, k, v, and for backward also do, lse, delta, by packed row.
            outputs: o and lse, or dq, by packed row, to be written.
            carried: k and v of the keys that are carried over from the nano-batch before.
            copies_keys: as of :class:`SentTick`.
        """

    def wait(self, running: RunningStep, sent: SentTick) -> None:
        """Waits until ``sent`` is complete, through recoveries."""


class RunningStep:
    """One step of a session; made by ``Session.step``.

    Args:
        plan: this rank's slice of any plan of the step: its documents and where their rows are.
        job: what the job's members agree on.
        rank: this rank.
        device: of the model's tensors.
        forward_only: whether there is no backward pass.
        ticks: sends ticks and waits for them.

    Attributes:
        machine: what becomes of its ticks, once it has begun.
        sent: the ticks that were sent.
        in_force: of the last plan that there were connections for; None before the first.
        stopped: it was ended before its last tick, and servers know.
        given_up: why its user gave it up; empty otherwise.
        calls: of core attention that autograd's graph still holds.
        on_complete: called at the end of the backward pass that completes the step.
        seconds: from its beginning to its end, once it has ended.
        plan_wait_seconds: how long it waited for its plan.
        waits: for ticks that are complete, on a CPU.
        device_waits: likewise, on a GPU.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        job: JobDescription,
        rank: int,
        device: torch.device,
        forward_only: bool,
        ticks: Ticks,
    ) -> None:
        self.plan = plan
        self.step = plan.step
        self.job = job
        self.rank = rank
        self.device = device
        self.forward_only = forward_only
        self.machine: StepMachine[PlannedStep, LossCause]
        self.sent: dict[Tick, SentTick] = {}
        self.in_force: Routes | None = None
        self.trace: list[TraceEvent] = []
        self.report: StepReport | None = None
        self._handed_over: dict[tuple[int, str], tuple[HandedOver, torch.Tensor]] = {}
        self._checks: list[Callable[[], None]] = []
        self._home_calls = [0] * job.n_nano_batches
        self.waits: list[TickWait] = []
        self.device_waits: list[DeviceWait] = []
        self.wait_seconds = self.send_seconds = self.recovery_seconds = 0.0
        self.sent_bytes = self.received_bytes = 0
        self.recoveries = self.replayed_ticks = 0
        self.began_seconds = time.perf_counter()
        self.seconds = self.plan_wait_seconds = 0.0
        self.closed = self.stopped = False
        self.given_up = ""
        self.calls: WeakSet[object] = WeakSet()
        self.on_complete: Callable[[], None] | None = None
        self.ticks = ticks
        manifest = plan.manifest
        self._n_rows = tuple(
            int(manifest.tokens_per_rank(nano_batch)[rank])
            for nano_batch in range(job.n_nano_batches)
        )

    @property
    def lane_outlines(self) -> tuple[LaneOutline, ...]:
        """The outlines of its nano-batches, for the machine."""
        return tuple(
            LaneOutline(has_rows=bool(n_rows), is_shared=self._is_shared(nano_batch))
            for nano_batch, n_rows in enumerate(self._n_rows)
        )

    def segments(self, nano_batch: int) -> list[tuple[int, int, int]]:
        """(packed row, offset in its document, length) of this rank's segments, by row."""
        manifest = self.plan.manifest
        nano = manifest.document_nano_batch[manifest.segment_document]
        mine = (manifest.segment_rank == self.rank) & (nano == nano_batch)
        return sorted(
            zip(
                manifest.segment_row[mine].tolist(),
                manifest.segment_offset[mine].tolist(),
                manifest.segment_length[mine].tolist(),
                strict=True,
            )
        )

    def carried(self, nano_batch: int) -> tuple[tuple[int, int], ...]:
        """(first packed row, rows) in the nano-batch before of each run of keys that ``nano_batch``
        carries over, in the order in which they lie behind its own rows. Empty if it does not, or
        if there is no such nano-batch."""
        return self._carried.get(nano_batch, ())

    @cached_property
    def _carried(self) -> dict[int, tuple[tuple[int, int], ...]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for nano_batch, row, length in self.plan.manifest.handed_over(self.rank):
            found.setdefault(nano_batch, []).append((row, length))
        return {nano_batch: tuple(runs) for nano_batch, runs in found.items()}

    def n_rows(self, nano_batch: int) -> int:
        """Packed rows of this rank's nano-batch."""
        return self._n_rows[nano_batch]

    def forward_call(self, nano_batch: int, *, needs_backward: bool) -> int:
        """Counts a nano-batch's attention calls; returns the call's layer."""
        with self.ticks.lock:
            return self.machine.lanes[nano_batch].calls.forward(needs_backward)

    def home_call(self, nano_batch: int) -> int:
        """Counts a nano-batch's calls that are computed at home; returns the call's number."""
        call = self._home_calls[nano_batch]
        self._home_calls[nano_batch] += 1
        return call

    def hand_over(
        self, nano_batch: int, call: str, handed: HandedOver, link: torch.Tensor
    ) -> HandedOver:
        """A nano-batch has come through a call and hands keys over to the next one.

        Args:
            nano_batch: which one hands them over.
            call: its name, the same in both nano-batches.
            handed: the keys.
            link: see :mod:`trainer_client.step.handed_over`.

        Returns:
            ``handed``.
        """
        self._handed_over[nano_batch, call] = handed, link
        return handed

    def take_over(
        self, nano_batch: int, call: str, *, needs_backward: bool
    ) -> tuple[HandedOver, torch.Tensor]:
        """A nano-batch has come to a call: what it takes over from the one before, and its link."""
        before = nano_batch - 1
        found = self._handed_over.pop((before, call), None)
        if found is None:
            raise SessionError(
                f"step {self.step}: nano-batch {nano_batch} has come to {call} before nano-batch "
                f"{before}, where a document begins that goes on in nano-batch {nano_batch}; run "
                "nano-batches in order"
            )
        handed, link = found
        handed.take(answers=needs_backward and link.requires_grad)
        return handed, link

    def close(self) -> None:
        """Its block has ended."""
        self.closed = True
        # Links lead to autograd's graph, which leads back here.
        self._handed_over.clear()

    def backward_call(self, nano_batch: int, layer: int) -> None:
        """The backward pass of a call begins."""
        if self._n_rows[nano_batch]:
            with self.ticks.lock:
                self.machine.lanes[nano_batch].calls.backward(layer)

    def stage_begins(self, nano_batch: int, stage: int, n_layers: int) -> None:
        """The forward pass of a nano-batch comes to a stage with ``n_layers`` calls."""
        with self.ticks.lock:
            self.machine.lanes[nano_batch].calls.stage_begins(stage, n_layers)

    def lane_returned(self, nano_batch: int) -> None:
        """The forward pass of a nano-batch is over, or that of a stage in it."""
        if self._n_rows[nano_batch]:
            self.machine.lanes[nano_batch].calls.returned()

    def give_up(self, reason: str) -> None:
        """Allows the step's block to end before its backward passes are complete, as when the loss
        is not finite. Ranks that still need this one's rows for it get an error with ``reason``."""
        self.given_up = reason

    def check_at_end(self, check: Callable[[], None]) -> None:
        """Has ``check`` called when the step's block has ended without an error."""
        self._checks.append(check)

    def check_arguments(self) -> None:
        """Runs what :meth:`check_at_end` was given."""
        for check in self._checks:
            check()

    def check_ended(self) -> None:
        """Check that a step whose block ended without an error is complete, or was given up."""
        self.check_arguments()
        if self.complete or self.given_up:
            return
        if not self.called:
            # A model that silently runs another implementation would train without being served.
            raise SessionError(
                f"step {self.step} ended without a call of core attention; load the model with "
                "attn_implementation='distca', or see what check_documents(model) of "
                "trainer_client.models.transformers says"
            )
        raise SessionError(
            f"step {self.step} was not run to its end: {self.unfinished}; run backward in its "
            "block, submit(..., forward_only=True), or call give_up(reason) of the step"
        )

    @property
    def unfinished(self) -> str:
        """The lanes that lack ticks, in words."""
        return ", ".join(
            f"nano-batch {nano_batch} made {lane.calls.forward_calls} of {lane.calls.n_layers} "
            f"forward and {lane.calls.backward_calls} of {lane.calls.expected_backward_calls} "
            "backward calls of core attention"
            for nano_batch, lane in enumerate(self.machine.lanes)
            if not lane.is_over
        )

    @property
    def called(self) -> bool:
        """Return whether core attention was called at all; True for a step without rows."""
        return any(lane.calls.forward_calls for lane in self.machine.lanes) or not any(self._n_rows)

    @property
    def complete(self) -> bool:
        """Return whether every tick that servers expect of this rank is complete."""
        return all(lane.is_over for lane in self.machine.lanes)

    def served_tasks(self) -> Iterator[ServedTasks]:
        """The tasks that every server of the plan in force runs for this rank in the step."""
        plan = self.in_force
        for nano_batch in range(self.job.n_nano_batches if plan else 0):
            calls = self.machine.lanes[nano_batch].calls
            backward = calls.expected_backward_calls
            for phase, n_calls in ((Phase.FORWARD, calls.n_layers), (Phase.BACKWARD, backward)):
                if not n_calls:
                    continue
                assert plan is not None
                layers = n_calls * calls.head_groups
                last_layer = calls.first_layer if phase is Phase.BACKWARD else self.job.n_layers - 1
                last = Tick(self.step, last_layer, nano_batch, phase)
                for exchange in plan.of(last):
                    route, connection = exchange.route, exchange.connection
                    yield ServedTasks(
                        transport=OWN_PROCESS if connection is None else connection.transport,
                        phase=phase,
                        tasks=len(route.task) * layers,
                        q_rows=route.n_q_rows * layers,
                        kv_rows=route.n_kv_rows * layers,
                    )

    def needed_ranks(self, tick: Tick) -> list[int]:
        """The ranks whose rows this rank's reply of ``tick`` needs: forward, those with earlier
        rows of its documents; backward, and under the full mask, with any."""
        manifest = self.plan.manifest
        held = manifest.held
        in_lane = manifest.document_nano_batch[held.document] == tick.nano_batch
        mine = in_lane & (held.rank == self.rank)
        last = np.full(manifest.n_documents, -1, dtype=np.int64)
        np.maximum.at(last, held.document[mine], held.offset[mine])
        needed = in_lane & ~mine & (last[held.document] >= 0)
        if tick.phase is Phase.FORWARD and self.plan.mask is MaskKind.CAUSAL:
            # A reply is for queries, which carried keys have none of.
            asks = last >= manifest.document_begin
            needed &= asks[held.document] & (held.offset < last[held.document])
        return [int(rank) for rank in np.unique(held.rank[needed])]

    def spent(self, name: str, tick: Tick, begin: float) -> None:
        """The rank's thread was in the ``"send"`` or ``"wait"`` of ``tick`` since ``begin``, on
        ``time.perf_counter``'s clock."""
        end = time.perf_counter()
        detail = f"layer {tick.layer} {tick.phase}"
        self.record(f"nano-batch {tick.nano_batch}", name, begin, end, detail)
        if name == "wait":
            self.wait_seconds += end - begin
        else:
            self.send_seconds += end - begin

    def record(self, lane: str, name: str, begin: float, end: float, detail: str = "") -> None:
        """Adds an event with times on ``time.perf_counter``'s clock."""
        self.trace.append(
            TraceEvent(lane, name, begin - self.began_seconds, end - self.began_seconds, detail)
        )

    def _is_shared(self, nano_batch: int) -> bool:
        """Return whether a document of the nano-batch has rows, or keys that are carried over, here
        and on another rank."""
        manifest = self.plan.manifest
        held = manifest.held
        here = np.unique(held.document[held.rank == self.rank])
        here = here[manifest.document_nano_batch[here] == nano_batch]
        away = held.document[held.rank != self.rank]
        return bool(np.isin(here, away).any())
