"""What can happen to a rank.

Manifests, plans and causes are handles: the machine keeps them, gives them back, and never looks
into them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from core_attention.tick import Tick

Manifest = TypeVar("Manifest")
"""What a rank hands in for a step."""

Plan = TypeVar("Plan")
"""A rank's slice of a plan."""

Cause = TypeVar("Cause")
"""How the loss of a server was noticed."""


@dataclass(frozen=True, slots=True)
class LaneOutline:
    """What the machine needs to know of a nano-batch of a step.

    Attributes:
        has_rows: the rank has packed rows in it.
        is_shared: one of its documents has rows on this rank and on another one.
    """

    has_rows: bool
    is_shared: bool


@dataclass(frozen=True, eq=False, slots=True)
class PlanOutline(Generic[Plan]):
    """What the machine needs to know of a plan.

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


@dataclass(frozen=True, slots=True)
class HandedIn(Generic[Manifest]):
    """The training loop has submitted a step."""

    step: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ManifestTaken:
    """The control plane has the manifest of a step."""

    step: int


@dataclass(frozen=True, slots=True)
class ManifestRefused:
    """The control plane does not take the manifest of a step."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class StepFailed:
    """A step gets no plan any more."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class PlanCame(Generic[Plan]):
    """A plan has come, perhaps again, for a step to come or for one that runs."""

    outline: PlanOutline[Plan]


@dataclass(frozen=True, slots=True)
class OwnServerPlanned(Generic[Plan]):
    """This process's own server has a plan, so that steps may run under it."""

    outline: PlanOutline[Plan]


@dataclass(frozen=True, slots=True)
class RecoveryBegan:
    """Plans of epochs below ``epoch`` are void, and the rank is asked how far it is; perhaps
    again."""

    epoch: int
    lost: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class AllFinished:
    """Every rank has finished ``step`` and those before."""

    step: int


@dataclass(frozen=True, slots=True)
class StepBegun:
    """The training loop begins a step that has a plan."""

    step: int
    lanes: tuple[LaneOutline, ...]
    forward_only: bool


@dataclass(frozen=True, slots=True)
class StepEnded:
    """The step's block has ended; ``why``, if it was not run to its end."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Connected:
    """There are connections to all servers of a plan."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ServersUnreachable(Generic[Cause]):
    """Some servers of a plan cannot be connected to: why, by server."""

    step: int
    epoch: int
    cause: Cause
    details: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ReplayBroke:
    """Something that nobody thought of has kept a plan from coming into force."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class TickBegun:
    """The training loop has the rows of a tick."""

    tick: Tick


@dataclass(frozen=True, slots=True)
class ReplaySent:
    """What ``ReportReplay`` came behind has been sent."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class TickUnderWay:
    """All requests of a tick have been handed over."""

    tick: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class RepliesHere:
    """All replies to a tick have arrived."""

    tick: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class RepliesExamined:
    """Nothing is wrong with the replies to a tick."""

    tick: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class ServerFailed(Generic[Cause]):
    """A server cannot be sent to, owes a reply that will not come, or has given a wrong one."""

    tick: Tick
    epoch: int
    server_id: str
    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """The training loop waits for a tick that is not under way.

    Attributes:
        can_be_planned: the control plane can be reached.
    """

    step: int
    can_be_planned: bool


Event: TypeAlias = (
    HandedIn[Manifest]
    | ManifestTaken
    | ManifestRefused
    | PlanCame[Plan]
    | OwnServerPlanned[Plan]
    | TickBegun
    | TickUnderWay
    | RepliesHere
    | RepliesExamined
    | ServerFailed[Cause]
    | StillWaiting
    | StepBegun
    | Connected
    | ReplaySent
    | StepEnded
    | AllFinished
    | StepFailed
    | ServersUnreachable[Cause]
    | ReplayBroke
    | RecoveryBegan
)
