"""The things that a server is to do, in order, without holding a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeAlias

from attention_node.machine.outline import Peer, Work
from attention_node.machine.tick import TickMachine
from core_attention.tick import Tick


@dataclass(frozen=True, slots=True)
class PostReceive(Generic[Peer, Work]):
    """Post the receive of a tick's request; without memory for it, call ``no_room``."""

    peer: Peer
    step: Work
    tick: Tick


@dataclass(frozen=True, slots=True)
class GiveUpTick(Generic[Work]):
    """End a tick without results, then call ``tick_over``."""

    step: Work
    tick: TickMachine
    why: str


@dataclass(frozen=True, slots=True)
class LeaveTick(Generic[Work]):
    """Go on with a tick without a rank, whose rows will not come."""

    step: Work
    tick: TickMachine
    rank: int


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
    """Close a rank's connection, with a reason for the rank."""

    peer: Peer
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
class RetrySoon:
    """Call ``retry`` soon, from a thread that may post receives."""


@dataclass(frozen=True, slots=True)
class ReportWait:
    """A rank has waited for memory, with nothing posted for one of its lanes."""

    seconds: float


@dataclass(frozen=True, slots=True)
class LogLine:
    """Say so in the log."""

    text: str
    level: Literal["info", "warning", "error"] = "info"


Instruction: TypeAlias = (
    PostReceive[Peer, Work]
    | GiveUpTick[Work]
    | LeaveTick[Work]
    | ReserveMemory[Work]
    | ReportStep[Work]
    | CloseConnection[Peer]
    | ReportGone[Peer]
    | RetrySoon
    | ReportWait
    | LogLine
)
