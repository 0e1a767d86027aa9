"""Steps and plans as a rank's machine sees them.

Manifests, plans and causes are handles: the machine keeps them, gives them back, and never looks
into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Manifest = TypeVar("Manifest")
"""A manifest, as handed in for a step."""

Plan = TypeVar("Plan")
"""A rank's slice of a plan."""

Cause = TypeVar("Cause")
"""A cause by which the loss of a server was noticed."""


@dataclass(frozen=True, slots=True)
class LaneOutline:
    """A nano-batch of a step.

    Attributes:
        has_rows: the rank has packed rows in it.
        is_shared: one of its documents has rows on this rank and on another one.
    """

    has_rows: bool
    is_shared: bool


@dataclass(frozen=True, eq=False, slots=True)
class PlanOutline(Generic[Plan]):
    """A plan of a step.

    Attributes:
        step, epoch: of the plan.
        plan: the plan's handle.
        first_ticks: by nano-batch, the place in the lane from which on rows of this rank are
            exchanged under this plan.
    """

    step: int
    epoch: int
    plan: Plan
    first_ticks: tuple[int, ...]
