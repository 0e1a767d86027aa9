"""One core-attention call of one nano-batch: send and collect, forward and backward.

Each phase has two halves. ``send_*`` packs one request per server and returns at once;
``collect_*`` waits for the replies and puts the rows back in their places. Between them the trainer
computes something else: with ping-pong, the other nano-batch. A call is a tick, or one for each
group of heads, all sent before the first is collected: replies of one travel while servers compute
the next.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.errors import CoreAttentionFailed
from trainer_client.step.handed_over import HandedOver
from trainer_client.step.replies import Tensors
from trainer_client.step.running_step import RunningStep
from trainer_client.step.sent_tick import SentTick


class AttentionCall:
    """The exchanges of one (step, layer, nano-batch).

    Args:
        running: the step.
        layer: index of the call in the nano-batch's forward.
        nano_batch: which nano-batch.
        taken_over: the keys that it carries over from the nano-batch before.
        copies_keys: see :class:`trainer_client.step.sent_tick.SentTick`.

    Attributes:
        handed_over: the keys that the next nano-batch carries over from this one, if it does.
    """

    def __init__(
        self,
        running: RunningStep,
        layer: int,
        nano_batch: int,
        taken_over: HandedOver | None = None,
        *,
        copies_keys: bool,
    ) -> None:
        self.handed_over: HandedOver | None = None
        self._copies_keys = copies_keys
        self._taken_over = taken_over
        self._running = running
        self._layer = layer
        self._nano_batch = nano_batch
        self._sent: list[SentTick] = []
        self._phases_sent: set[Phase] = set()
        running.calls.add(self)

    def send_forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Sends q ``[rows, heads, head_dim]``, k and v ``[rows, heads_kv, head_dim]``, packed
        rows of this rank's nano-batch."""
        self._send(Phase.FORWARD, {"q": q, "k": k, "v": v})

    def collect_forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Waits for o ``[rows, heads, head_dim_v]`` and lse ``[rows, heads]`` float32."""
        outputs, _ = self._collect(Phase.FORWARD)
        return outputs["o"], outputs["lse"]

    def send_backward(self, inputs: Tensors) -> None:
        """Sends q, k, v, do, lse and delta, by packed row."""
        self._send(Phase.BACKWARD, inputs)

    def collect_backward(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Waits for dq, dk and dv, in the dtype of q.

        dk and dv come from several servers: they are summed in float32, in the plan's order of
        servers, then the next nano-batch's share of keys that it carries over is added, and they
        are rounded once."""
        outputs, gradients = self._collect(Phase.BACKWARD)
        dq = outputs["dq"]
        if self._taken_over is not None:
            n_rows = len(dq)
            self._taken_over.answer({name: rows[n_rows:] for name, rows in gradients.items()})
            gradients = {name: rows[:n_rows] for name, rows in gradients.items()}
        if self.handed_over is not None:
            self.handed_over.add_to(gradients)
        return dq, gradients["dk"].to(dq.dtype), gradients["dv"].to(dq.dtype)

    def end_step(self) -> None:
        """If the step is complete by this call, ends it when the backward pass that runs is over:
        the caller of ``backward`` may do anything after it."""
        running = self._running
        if running.on_complete is not None and running.complete:
            untyped: Any = torch.autograd.Variable
            untyped._execution_engine.queue_callback(running.on_complete)

    def _send(self, phase: Phase, inputs: Tensors) -> None:
        running, n_groups = self._running, self._running.job.head_groups
        tick = Tick(running.step, self._layer * n_groups, self._nano_batch, phase)
        if phase is Phase.BACKWARD and running.forward_only:
            raise CoreAttentionFailed(
                f"{tick}: the step was submitted as forward-only; submit it with "
                "forward_only=False to run backward"
            )
        if phase in self._phases_sent:
            raise CoreAttentionFailed(
                f"{tick} was run before; core attention is differentiable once: run backward once, "
                "without retain_graph"
            )
        if phase is Phase.BACKWARD:
            running.backward_call(self._nano_batch, self._layer)
        self._phases_sent.add(phase)
        carried = self._taken_over.rows if self._taken_over is not None else {}
        # As the lane goes.
        for group in range(n_groups)[:: 1 if phase is Phase.FORWARD else -1]:
            begin, of_group = time.perf_counter(), replace(tick, layer=tick.layer + group)
            sent = running.ticks.send(
                running,
                of_group,
                _heads(inputs, group, n_groups),
                self._outputs(phase, inputs["q"]),
                _heads(carried, group, n_groups),
                copies_keys=self._copies_keys,
            )
            self._sent.append(sent)
            running.spent("send", of_group, begin)

    def _outputs(self, phase: Phase, q: torch.Tensor) -> Tensors:
        shape, n_rows = self._running.job.shape, len(q)
        # Other threads write to them, which may not be done to tensors of inference mode.
        with torch.inference_mode(False):
            if phase is Phase.BACKWARD:
                return {"dq": q.new_empty((n_rows, shape.num_heads, shape.head_dim))}
            return {
                "o": q.new_empty((n_rows, shape.num_heads, shape.head_dim_v)),
                "lse": q.new_empty((n_rows, shape.num_heads), dtype=torch.float32),
            }

    def _collect(self, phase: Phase) -> tuple[Tensors, Tensors]:
        ticks, self._sent = self._sent, []
        if not ticks or ticks[0].tick.phase is not phase:
            raise CoreAttentionFailed(
                f"nano-batch {self._nano_batch} layer {self._layer}: {phase} collected before it "
                "was sent; run backward once, in the step's own block"
            )
        for sent in ticks:
            begin = time.perf_counter()
            try:
                self._running.ticks.wait(self._running, sent)
            finally:
                self._running.spent("wait", sent.tick, begin)
        ticks.sort(key=lambda sent: sent.tick)
        outputs, gradients = zip(*(sent.hand_out() for sent in ticks), strict=True)
        return _all_heads(outputs), _all_heads(gradients)


def _heads(tensors: Tensors, group: int, n_groups: int) -> Tensors:
    """The heads of one of so many equal groups."""
    if n_groups == 1:
        return tensors
    return {name: rows.chunk(n_groups, dim=1)[group] for name, rows in tensors.items()}


def _all_heads(groups: Sequence[Tensors]) -> Tensors:
    if len(groups) == 1:
        return groups[0]
    return {name: torch.cat([group[name] for group in groups], dim=1) for name in groups[0]}
