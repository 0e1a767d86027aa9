"""A session without a control plane or servers: each tick is computed where it is awaited."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from attention_node.served_job import JobDescription
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest
from core_attention.step_lane import place_of, placed
from core_attention.tick import Tick
from distca.v1 import jobs_pb2
from trainer_client.errors import CoreAttentionFailed
from trainer_client.hooks.checkpointing import forget_step
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.machine.instructions import EndLane, ForgetInputs, ForgetQueries
from trainer_client.machine.outlines import PlanOutline
from trainer_client.machine.rank import RankMachine
from trainer_client.options import SessionOptions
from trainer_client.step.replies import Tensors
from trainer_client.step.running_step import RunningStep
from trainer_client.step.sent_tick import SentTick


class LocalSession:
    """Stands for :class:`trainer_client.session.Session`, of a job with one rank.

    Attributes:
        reported: steps, in the order in which they were reported.
        skips: the first tick of each lane that servers are told not to expect.
        nano_batches: those that had a tick.
        closed_with: the error that other ranks are told.
    """

    def __init__(self, options: SessionOptions) -> None:
        self.options = options
        self.next_step = self._first_free = 0
        self.reported: list[int] = []
        self.skips: list[EndLane] = []
        self.nano_batches: set[int] = set()
        self.closed_with: str | None = None
        self.lock = threading.Condition()
        self._machine: RankMachine[Any, Any, Any] = RankMachine(
            options.n_layers,
            options.n_nano_batches,
            head_groups=options.head_groups,
            recovery_timeout_seconds=1.0,
        )
        self._job = JobDescription(
            job_id="job",
            verification_key=b"",
            n_ranks=1,
            n_layers=options.layer_ticks,
            n_nano_batches=options.n_nano_batches,
            shape=options.tick_shape,
            scale=options.scale,
            name="job",
            head_groups=options.head_groups,
        )
        self._forward_only: dict[int, bool] = {}
        self._manifests: dict[int, RankManifest] = {}
        self._open: set[int] = set()
        self._ended: set[int] = set()

    @classmethod
    def open(cls, options: SessionOptions) -> LocalSession:
        return cls(options)

    def join(self, manifest: RankManifest, joining: jobs_pb2.Joining, *, forward_only: bool) -> int:
        """The number follows at once where nobody else joins."""
        step = next(
            step
            for step in count(self._first_free)
            if place_of(step, self.options.n_nano_batches, joining.turns) not in joining.open_places
        )
        self._first_free = step + 1
        manifest = placed(manifest, step, joining.turns)
        self._manifests[step] = manifest
        self._forward_only[step] = forward_only
        self._machine.join(step + 1, manifest)
        self._machine.numbered(step + 1, step, manifest)
        return step + 1

    def tell(self, joining: jobs_pb2.Joining) -> None:
        """Nobody else needs to know."""

    def begin_joined(self, sequence: int) -> RunningStep:
        self.skip_before(sequence)
        return self.begin(sequence - 1)

    def skip_before(self, sequence: int) -> None:
        for step in self._machine.void_before(sequence):
            running = self.begin(step)
            self.stop(running)
            self.end(running)

    def begin(self, step: int) -> RunningStep:
        manifest = Manifest.merge([self._manifests[step]], 1)
        plan: Any = SimpleNamespace(manifest=manifest, step=step)
        running = RunningStep(
            plan,
            job=self._job,
            rank=0,
            device=torch.device("cpu"),
            forward_only=self._forward_only[step],
            ticks=self,
        )
        outline = PlanOutline(step, 1, plan, (0,) * self.options.n_nano_batches)
        self._machine.plan_came(outline, 0.0)
        self._machine.own_server_planned(outline)
        outlines, forward_only = running.lane_outlines, running.forward_only
        self.next_step = step + 1
        self._machine.begin_step(step, outlines, forward_only=forward_only, now=0.0)
        self._machine.connected(step, 1, 0.0)
        machine = self._machine.running(step)
        assert machine is not None
        running.machine = machine
        self._open.add(step)
        return running

    def stop(self, running: RunningStep) -> None:
        self.skips += running.machine.stop()
        running.stopped = True

    def end(self, running: RunningStep, why: str = "") -> None:
        running.close()
        self._open.discard(running.step)
        self._ended.add(running.step)
        self._machine.end_step(running.step, why)
        forget_step(running)

    def report_ended(self, device_seconds: float = 0.0) -> None:
        before = min(self._open, default=self.next_step)
        self.reported += sorted(step for step in self._ended if step < before)
        self._ended = {step for step in self._ended if step >= before}

    def await_cause(self, error: BaseException) -> None:
        """Others' processes run."""

    def close(self, error: str = "") -> None:
        self.closed_with = error
        self.report_ended()

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
        if running.closed:
            raise CoreAttentionFailed(f"step {running.step} is over")
        sent = SentTick(tick, Unwritten(tick, inputs), None, copies_keys, outputs, None)
        running.sent[tick] = sent
        self.nano_batches.add(tick.nano_batch)
        running.machine.begin(tick)
        return sent

    def wait(self, running: RunningStep, sent: SentTick) -> None:
        self._compute(running, sent)
        tick, machine = sent.tick, running.machine
        machine.under_way(tick, 1)
        machine.replies_here(tick, 1)
        for instruction in machine.examined(tick, 1):
            match instruction:
                case ForgetInputs(done):
                    running.sent[done].forget_inputs()
                case ForgetQueries(done):
                    running.sent[done].forget_queries()
                case EndLane():
                    self.skips.append(instruction)
        sent.complete = True

    def _compute(self, running: RunningStep, sent: SentTick) -> None:
        inputs = sent.rows()
        is_forward = sent.tick.phase is Phase.FORWARD
        if not is_forward:
            sent.gradients = sent.zero_gradients(self._job.shape)
        for row, _, length in running.segments(sent.tick.nano_batch):
            rows = slice(row, row + length)
            q, k, v = (inputs[name][rows].detach().clone() for name in ("q", "k", "v"))
            # Not where an activation checkpoint would see what autograd saves.
            with torch.set_grad_enabled(not is_forward):
                leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
                q, k, v = (tensor.transpose(0, 1) for tensor in leaves)
                o = scaled_dot_product_attention(
                    q, k, v, is_causal=True, scale=self.options.scale, enable_gqa=True
                ).transpose(0, 1)
            if is_forward:
                sent.outputs["o"][rows] = o.detach()
                sent.outputs["lse"][rows] = 0.0
                continue
            dq, dk, dv = torch.autograd.grad(o, leaves, inputs["do"][rows])
            sent.outputs["dq"][rows] = dq
            sent.gradients["dk"][rows] += dk
            sent.gradients["dv"][rows] += dv
