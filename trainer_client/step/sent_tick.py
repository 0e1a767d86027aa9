"""The rows and replies of a tick that this rank has begun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from attention_node.cuda_order import record_event
from core_attention.shape import AttentionShape
from core_attention.tick import Tick
from trainer_client.hooks.input_versions import Unwritten
from trainer_client.step.replies import Awaited, Tensors


@dataclass(eq=False)
class SentTick:
    """A tick that this rank has run, or runs.

    Attributes:
        tick: which exchange.
        inputs: what is sent, by packed row; of a complete forward tick k and v only; None once
            nobody can ask for it again.
        carried: k and v of the keys that are carried over from the nano-batch before, if any are.
        copies_keys: of the complete tick copies of k and v are kept, since nothing else sees to it
            that nobody writes to them.
        outputs: o and lse, or dq, by packed row; once handed out, their shapes only ("meta").
        gradients: dk and dv, by packed row, float32: from completion until they are handed out.
        written: on a GPU, the event after which the inputs are complete.
        awaited: replies by the epoch of the plan, in its order of servers.
        sent_at: ``time.monotonic()`` when all requests were handed over.
        waited_since: when the training loop began to wait for it.
        answered_at: when its last reply was here; of a complete tick.
        flight_seconds: from its rows' going until then, likewise.
        complete: all replies have been taken in.
    """

    tick: Tick
    inputs: Unwritten | None
    carried: Unwritten | None
    copies_keys: bool
    outputs: Tensors
    written: torch.cuda.Event | None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    awaited: dict[int, Sequence[Awaited]] = field(default_factory=dict)
    sent_at: float = 0.0
    waited_since: float = 0.0
    answered_at: float = 0.0
    flight_seconds: float = 0.0
    complete: bool = False
    _joined: dict[str, torch.Tensor] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ChangedInPlace if the inputs were written to since the tick began."""
        for held in (self.inputs, self.carried):
            if held is not None:
                held.get()

    def rows(self) -> Tensors:
        """The inputs as routes count them: behind the rows of k and v lie those carried over; each
        contiguous. Empty once nobody can ask for them again. On a GPU, for the current stream."""
        held, over = self.inputs, self.carried
        if held is None:
            return {}
        inputs, carried = held.get(), {} if over is None else over.get()
        # Read after the inputs, which another thread may be replacing.
        if self.written is not None:
            torch.cuda.current_stream(inputs["k"].device).wait_event(self.written)
        if not self._joined:
            # Kept until the replies are taken in: the in-place server reads them on a stream that
            # the allocator knows nothing of.
            self._joined = {
                name: torch.cat([rows, carried[name]]) if name in carried else rows.contiguous()
                for name, rows in inputs.items()
            }
        return {name: self._joined[name] for name in inputs}

    def hand_out(self) -> tuple[Tensors, Tensors]:
        """The outputs and gradients of the complete tick, which it keeps no longer."""
        outputs, gradients = self.outputs, self.gradients
        self._joined = {}
        self.outputs = {name: tensor.to("meta") for name, tensor in outputs.items()}
        self.gradients = {}
        return outputs, gradients

    def zero_gradients(self, shape: AttentionShape) -> dict[str, torch.Tensor]:
        """The tensors in which parts of dk and dv are summed up, float32."""
        assert self.inputs is not None
        k = self.inputs.get()["k"]
        n_rows = len(k) + (0 if self.carried is None else len(self.carried.get()["k"]))
        return {
            name: k.new_zeros((n_rows, shape.num_heads_kv, head_dim), dtype=torch.float32)
            for name, head_dim in (("dk", shape.head_dim), ("dv", shape.head_dim_v))
        }

    def forget_queries(self) -> None:
        """Keeps of the inputs what others may need."""
        if self.inputs is not None:
            inputs = self.inputs.get()
            keys = {name: inputs[name] for name in ("k", "v")}
            copied = Unwritten(self.tick, keys, copy=self.copies_keys)
            self.written = record_event(keys["k"].device)
            self.inputs, self._joined = copied, {}

    def forget_inputs(self) -> None:
        """Keeps none of them."""
        self.inputs, self.carried, self._joined = None, None, {}

    def let_go(self, epoch: int) -> int:
        """Lets go of the replies of an epoch. Returns how many of them were here."""
        awaited = self.awaited.pop(epoch, ())
        for reply in awaited:
            reply.let_go()
        return sum(reply.ended_at > 0.0 for reply in awaited)
