"""What a server holds of the messages of pipelines, slot by slot of the schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from attention_node.machine.outline import StepOutline
from core_attention.tick import Tick
from core_attention.tick_order import TickOrder


def held_by_slot(
    order: TickOrder, outline: StepOutline, sizes: Callable[[int, Tick], list[int]]
) -> dict[int, list[int]]:
    """Sizes in bytes of the messages that are held in each slot: of each rank those of its action
    there, see ``attention_node.machine.turns``.

    Args:
        order: in which ranks come to their ticks.
        outline: of the step.
        sizes: of a rank's messages of a tick.
    """
    held: defaultdict[int, list[int]] = defaultdict(list)
    counted: set[tuple[int, int, int]] = set()
    for nano_batch, ticks in outline.lanes.items():
        for tick, each in ticks.items():
            for rank in each.message_bytes:
                for slot in order.slots(rank, tick):
                    # Of all layers of an action, one at a time.
                    if (slot, rank, nano_batch) not in counted:
                        counted.add((slot, rank, nano_batch))
                        held[slot] += sizes(rank, tick)
    return held
