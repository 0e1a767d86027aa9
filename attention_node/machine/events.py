"""What can happen to a server.

``peer`` and ``step`` are handles: the machine compares them and gives them back, and never looks
into them. In a server they are its own objects, in tests numbers or names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from attention_node.machine.outline import StepOutline
from core_attention.tick import Tick
from core_attention.tick_order import TickOrder

Peer = TypeVar("Peer")
"""The connection of a rank."""

Work = TypeVar("Work")
"""A planned step."""


@dataclass(frozen=True, slots=True)
class JobOpened:
    """The control plane has announced a job; idempotent.

    Attributes:
        order: in which its ranks come to their ticks, if they form pipelines.
    """

    job_id: str
    n_nano_batches: int
    order: TickOrder | None = None


@dataclass(frozen=True, slots=True)
class JobClosed:
    """A job is over; idempotent."""

    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class JobRecovered:
    """Plans and connections of epochs below ``epoch`` are void; idempotent."""

    job_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class PlanCame:
    """A plan has come, perhaps again. ``DerivePlan`` says that its outline is wanted."""

    job_id: str
    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class StepPlanned(Generic[Work]):
    """The outline of a plan that was wanted."""

    job_id: str
    step: Work
    outline: StepOutline


@dataclass(frozen=True, slots=True)
class RankConnected(Generic[Peer]):
    """A rank that has proven itself asks to be served from ``first_step`` on."""

    job_id: str
    peer: Peer
    rank: int
    first_step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class RankGone(Generic[Peer]):
    """A connection has ended; ``was_reset``: by the operating system of a peer that is no more."""

    peer: Peer
    was_reset: bool


@dataclass(frozen=True, slots=True)
class RowsArrived(Generic[Peer, Work]):
    """The request of a posted receive is here."""

    job_id: str
    peer: Peer
    step: Work
    tick: Tick


@dataclass(frozen=True, slots=True)
class LaneSkipped(Generic[Peer, Work]):
    """The rank has skipped a posted receive: it sends nothing of the tick's lane any more in the
    step, for it needs no gradients from that layer down. It may have left since."""

    job_id: str
    peer: Peer
    rank: int
    step: Work
    tick: Tick


@dataclass(frozen=True, slots=True)
class Answered(Generic[Peer]):
    """A rank is owed nothing more of a tick: it may send the one behind it."""

    peer: Peer
    tick: Tick


@dataclass(frozen=True, slots=True)
class LocalRows:
    """The rank in the server's own process hands in its side of a tick."""

    job_id: str
    epoch: int
    tick: Tick


@dataclass(frozen=True, slots=True)
class LocalLaneEnded:
    """As :class:`LaneSkipped`, of the rank in the server's own process."""

    job_id: str
    epoch: int
    rank: int
    first: Tick


@dataclass(frozen=True, slots=True)
class StepsAbandoned:
    """The rank in the server's own process does not run steps before ``first_step`` to the end."""

    job_id: str
    rank: int
    first_step: int


@dataclass(frozen=True, slots=True)
class TickOver(Generic[Work]):
    """Every rank of a tick has its reply, or the tick was given up.

    Attributes:
        failure: why it failed; empty if it did not.
    """

    job_id: str
    step: Work
    tick: Tick
    failure: str


@dataclass(frozen=True, slots=True)
class NoRoom(Generic[Peer]):
    """There was no memory for a receive that was to be posted."""

    peer: Peer
    tick: Tick


@dataclass(frozen=True, slots=True)
class MemoryFreed:
    """Memory of messages has come back."""


@dataclass(frozen=True, slots=True)
class RetryDue:
    """Soon after ``RetrySoon``."""


@dataclass(frozen=True, slots=True)
class ReplyBegun:
    """A reply is on its way."""


@dataclass(frozen=True, slots=True)
class ReplyEnded:
    """A reply has left, or could not."""


Event: TypeAlias = (
    RowsArrived[Peer, Work]
    | Answered[Peer]
    | TickOver[Work]
    | ReplyBegun
    | ReplyEnded
    | MemoryFreed
    | RetryDue
    | NoRoom[Peer]
    | LocalRows
    | LaneSkipped[Peer, Work]
    | LocalLaneEnded
    | StepsAbandoned
    | PlanCame
    | StepPlanned[Work]
    | RankConnected[Peer]
    | RankGone[Peer]
    | JobOpened
    | JobRecovered
    | JobClosed
)
