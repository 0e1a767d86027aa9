"""What a server holds of the messages of pipelines: those of two actions of each rank at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

from attention_node.machine.outline import StepOutline
from core_attention.tick import Tick
from core_attention.tick_order import TickOrder


def held_in_turn(
    order: TickOrder, outline: StepOutline, sizes: Callable[[int, Tick], list[int]]
) -> list[int]:
    """Sizes in bytes of the messages of a step that are held at a time: of each rank those of the
    largest two actions in a row (``attention_node.machine.turns.ACTIONS_AHEAD``).

    Args:
        order: in which ranks come to their ticks.
        outline: of the step.
        sizes: of a rank's messages of a tick.
    """
    # By rank and action: the sizes of each of its nano-batches.
    actions: dict[int, dict[int, dict[int, list[int]]]] = {}
    for nano_batch, ticks in outline.lanes.items():
        for tick, each in ticks.items():
            for rank in each.message_bytes:
                of_rank = actions.setdefault(rank, {})
                rows = of_rank.setdefault(order.turn(rank, tick).latest, {})
                if nano_batch not in rows:
                    rows[nano_batch] = sizes(rank, tick)
    held: list[int] = []
    for of_rank in actions.values():
        in_turn = [[*chain(*of_rank[place].values())] for place in sorted(of_rank)]
        pairs = [one + other for one, other in pairwise(in_turn)] or in_turn
        held += max(pairs, key=sum)
    return held
