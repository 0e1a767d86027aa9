"""Ticks: the one exchange of a (step, layer, nano-batch, phase), and the order they come in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from core_attention.ca_task import Phase

STEP_BITS, LAYER_BITS, NANO_BATCH_BITS = 41, 12, 8
MAX_LAYERS = 1 << LAYER_BITS
MAX_NANO_BATCHES = 1 << NANO_BATCH_BITS


@dataclass(frozen=True, order=True)
class Tick:
    """One exchange between trainers and servers.

    Attributes:
        step: training step.
        layer: index of the attention call in the model's forward, from 0. Ranks of pipelines that
            have fewer calls than others have the last ones of the job's layers.
        nano_batch: index of the nano-batch.
        phase: forward or backward.
    """

    step: int
    layer: int
    nano_batch: int
    phase: Phase

    def tag(self, *, reply: bool) -> int:
        """The transport tag of this tick's request or reply; no two ticks share one.

        Bits, high to low: step 41, layer 12, nano-batch 8, phase 1, reply 1; the top bit stays
        free, so that a tag is a signed 64-bit number.
        """
        tag = self.step % (1 << STEP_BITS)
        tag = tag << LAYER_BITS | self.layer
        tag = tag << NANO_BATCH_BITS | self.nano_batch
        tag = tag << 1 | int(self.phase is Phase.BACKWARD)
        return tag << 1 | int(reply)

    def lane_index(self, n_layers: int) -> int:
        """Its place in its lane, from 0; see :func:`ticks_of_lane`."""
        return self.layer if self.phase is Phase.FORWARD else 2 * n_layers - 1 - self.layer

    def __str__(self) -> str:
        return f"step {self.step} layer {self.layer} nano-batch {self.nano_batch} {self.phase}"


def ticks_of_lane(step: int, nano_batch: int, n_layers: int, *, backward: bool) -> Iterator[Tick]:
    """The ticks of one nano-batch in a step, in the order in which every trainer runs them.

    A nano-batch is a lane: its forward ticks by layer, then its backward ticks mirrored. How the
    lanes of a step interleave (ping-pong, one after the other, pipeline schedules) is the
    trainer's choice, so no server may depend on it.
    """
    for layer in range(n_layers):
        yield Tick(step, layer, nano_batch, Phase.FORWARD)
    if backward:
        for layer in reversed(range(n_layers)):
            yield Tick(step, layer, nano_batch, Phase.BACKWARD)
