"""The ticks that a rank has sent in one lane of a step, and for how long their inputs are kept.

Whoever shares a document with this rank may have to replay a tick that is complete here; then this
rank sends its part again. How far behind they can be follows from causal attention (see
``docs/fault_tolerance.md``): in the backward pass one tick; in the forward pass any number, but
only until the first backward tick is complete here, since that one needs theirs. A rank that shares
no document keeps nothing of complete ticks.

Where something else keeps the ranks together (weights that are gathered layer by layer), fewer
forward ticks need be kept. A recovery that asks for one that is gone ends the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from core_attention.ca_task import Phase
from core_attention.tick import Tick
from trainer_client.step.replies import Awaited, Tensors


@dataclass(eq=False)
class SentTick:
    """A tick that this rank has run, or runs.

    Attributes:
        tick: which exchange.
        index: its place in its lane.
        inputs: what is sent, by packed row; of a complete forward tick k and v only; None once
            nobody can ask for it again.
        outputs: o and lse, or dq, by packed row; once handed out, their shapes only ("meta").
        gradients: dk and dv, by packed row, float32: from completion until they are handed out.
        written: on a GPU, the event after which the inputs are complete.
        awaited: replies under the plan in force, in its order of servers; None if the tick is not
            under way: the plan was made void, or a server has failed.
        sent_at: ``time.monotonic()`` when all requests were handed over.
        complete: all replies have been taken in.
    """

    tick: Tick
    index: int
    inputs: Tensors | None
    outputs: Tensors
    written: torch.cuda.Event | None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    awaited: list[Awaited] | None = None
    sent_at: float = 0.0
    complete: bool = False

    def hand_out(self) -> tuple[Tensors, Tensors]:
        """The outputs and gradients of the complete tick, which it keeps no longer."""
        outputs, gradients = self.outputs, self.gradients
        self.outputs = {name: tensor.to("meta") for name, tensor in outputs.items()}
        self.gradients = {}
        return outputs, gradients

    def stop_awaiting(self) -> int:
        """Lets go of all replies; none of them will be taken in. Returns how many were here."""
        awaited, self.awaited = self.awaited or [], None
        for reply in awaited:
            reply.let_go()
        return sum(reply.ended_at > 0.0 for reply in awaited)


class LaneLog:
    """One lane's sent ticks.

    Args:
        shared: whether a document of this nano-batch has rows on other ranks too.
        kept_forward_ticks: of how many complete forward ticks the inputs are kept, the latest; None
            for all of them.
    """

    def __init__(self, *, shared: bool, kept_forward_ticks: int | None = None) -> None:
        self.shared = shared
        self._kept_forward_ticks = kept_forward_ticks
        self.complete_ticks = 0
        self._sent: dict[int, SentTick] = {}

    def __iter__(self) -> Iterator[SentTick]:
        """The sent ticks in lane order."""
        return iter([self._sent[index] for index in sorted(self._sent)])

    @property
    def sent_ticks(self) -> int:
        """How many ticks were sent, complete or not."""
        return len(self._sent)

    def add(self, sent: SentTick) -> None:
        """A tick is sent."""
        self._sent[sent.index] = sent

    def completed(self, sent: SentTick) -> None:
        """All replies of ``sent`` have been taken in; lets go of inputs that nobody needs now."""
        sent.complete = True
        sent.stop_awaiting()
        while (following := self._sent.get(self.complete_ticks)) and following.complete:
            self.complete_ticks += 1
        if not self.shared:
            sent.inputs = None
        elif sent.tick.phase is Phase.BACKWARD:
            self._let_go(sent.index)
        elif sent.inputs is not None:
            # Its own queries are answered: if others replay it, any will do in their place.
            sent.inputs = {name: sent.inputs[name] for name in ("k", "v")}
            if self._kept_forward_ticks is not None:
                self._let_go(sent.index - self._kept_forward_ticks + 1)

    def _let_go(self, end: int) -> None:
        """Keeps no inputs of complete ticks before ``end``."""
        for earlier in self._sent.values():
            if earlier.complete and earlier.index < end:
                earlier.inputs = None

    def release(self) -> None:
        """Nobody asks for anything again."""
        for sent in self._sent.values():
            sent.stop_awaiting()
            sent.inputs = None
