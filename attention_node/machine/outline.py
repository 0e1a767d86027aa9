"""The outline of a step on one server, without its rows: all that the machines need of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TypeVar

from core_attention.tick import Tick

Peer = TypeVar("Peer")
"""The handle of a rank's connection. The machine compares handles and gives them back, and never
looks into them: objects of the server, or numbers and names of a test."""

Work = TypeVar("Work")
"""The handle of a planned step."""


@dataclass(frozen=True, eq=False)
class TickOutline:
    """One server's side of a tick; the ticks in which the same tasks run share one.

    Attributes:
        needs: by part, the ranks whose rows it reads.
        before_reply: by rank that takes part, the parts that must have run before its reply.
        owed: the ranks that wait for rows before they go on; one that gives only keys, forward,
            does not.
        message_bytes: by rank that is connected, memory of its messages.
    """

    needs: tuple[frozenset[int], ...]
    before_reply: Mapping[int, frozenset[int]]
    owed: frozenset[int]
    message_bytes: Mapping[int, int]

    def is_shared_with(self, ranks: Set[int]) -> bool:
        """Returns whether the reply of another rank waits for rows of ``ranks``."""
        return bool(ranks) and any(
            self.needs[part] & ranks
            for rank, parts in self.before_reply.items()
            if rank not in ranks
            for part in parts
        )


@dataclass(frozen=True, eq=False)
class StepOutline:
    """One server's side of a planned step.

    Attributes:
        step, epoch: of the plan.
        n_layers: of the job.
        lanes: by nano-batch, the ticks in which somebody takes part, in the order of the lane.
    """

    step: int
    epoch: int
    n_layers: int
    lanes: Mapping[int, Mapping[Tick, TickOutline]]

    def has_rank(self, rank: int) -> bool:
        """Returns whether ``rank`` exchanges anything with the server in this step."""
        return any(
            rank in outline.before_reply
            for ticks in self.lanes.values()
            for outline in ticks.values()
        )
