"""What a server is to do, in this order, without holding a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias

from attention_node.machine.events import Peer, Work
from attention_node.machine.tick import TickMachine
from core_attention.tick import Tick


@dataclass(frozen=True, slots=True)
class PostReceive(Generic[Peer, Work]):
    """Post the receive of a tick's request, or report ``NoRoom``."""

    peer: Peer
    step: Work
    tick: Tick


@dataclass(frozen=True, slots=True)
class TakeRows(Generic[Work]):
    """The answer to rows that arrived: hand them to the tick."""

    step: Work
    tick: TickMachine


@dataclass(frozen=True, slots=True)
class RefuseRows:
    """The answer to rows that arrived: their tick is over, or given up."""

    why: str


@dataclass(frozen=True, slots=True)
class GiveUpTick(Generic[Work]):
    """End a tick without results, then report ``TickOver``."""

    step: Work
    tick: TickMachine
    why: str


@dataclass(frozen=True, slots=True)
class ReserveMemory(Generic[Work]):
    """Set memory aside for the messages of a step, before its first receives are posted."""

    step: Work


@dataclass(frozen=True, slots=True)
class ReportStep(Generic[Work]):
    """Every tick of a step is over, and none has failed."""

    step: Work


@dataclass(frozen=True, slots=True)
class CloseConnection(Generic[Peer]):
    """Close a rank's connection; it is told why."""

    peer: Peer
    why: str


@dataclass(frozen=True, slots=True)
class RefuseRank:
    """The answer to a rank that connects; without it, the rank is welcome."""

    cause: Literal["unknown-job", "memory", "epoch"]
    why: str


@dataclass(frozen=True, slots=True)
class ReportGone(Generic[Peer]):
    """A connection that counted has ended.

    Attributes:
        is_lost: the rank has no other one and this one was reset, so it may have died.
    """

    peer: Peer
    is_lost: bool


@dataclass(frozen=True, slots=True)
class DerivePlan:
    """The answer to a plan that is new: derive its outline and report ``StepPlanned``."""


@dataclass(frozen=True, slots=True)
class RetrySoon:
    """Report ``RetryDue`` soon, from a thread that may post receives."""


@dataclass(frozen=True, slots=True)
class ReportWait:
    """A rank has waited for memory, with nothing posted for one of its lanes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class ReportOverload:
    """Ranks begin to wait for memory."""


@dataclass(frozen=True, slots=True)
class ReportCalm:
    """No rank waits for memory any more, ``seconds`` after the first did."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Note:
    """Say so in the log."""

    text: str
    is_error: bool = False


Instruction: TypeAlias = (
    PostReceive[Peer, Work]
    | TakeRows[Work]
    | RefuseRows
    | GiveUpTick[Work]
    | ReserveMemory[Work]
    | ReportStep[Work]
    | CloseConnection[Peer]
    | RefuseRank
    | ReportGone[Peer]
    | DerivePlan
    | RetrySoon
    | ReportWait
    | ReportOverload
    | ReportCalm
    | Note
)
