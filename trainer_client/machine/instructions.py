"""The instructions that a rank carries out, in this order, without holding a lock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeAlias

from core_attention.tick import Tick
from trainer_client.machine.outlines import Cause, Plan, PlanOutline


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a rank in a step.

    Attributes:
        complete_ticks: by nano-batch, how many ticks are complete, from the first on.
        done: the rank will send no tick of the step for the first time any more.
    """

    step: int
    complete_ticks: tuple[int, ...]
    done: bool


@dataclass(frozen=True, slots=True)
class DeriveAhead(Generic[Plan]):
    """Derive what a step that has not begun needs, so that its first ticks need not wait."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanOwnServer(Generic[Plan]):
    """Give a plan to this process's own server, then call
    :meth:`RankMachine.own_server_planned`."""

    outline: PlanOutline[Plan]


@dataclass(frozen=True, slots=True)
class RecoverOwnServer:
    """Report to this process's own server, and to the log, that plans of lower epochs are void."""

    epoch: int
    why: str


@dataclass(frozen=True, slots=True)
class AbandonOwnServer:
    """Report to this process's own server that this rank goes on with ``first_step``."""

    first_step: int


@dataclass(frozen=True, slots=True)
class Connect(Generic[Plan]):
    """Connect to the servers of a plan; then call :meth:`RankMachine.connected` or
    :meth:`RankMachine.unreachable`.

    Attributes:
        first_step: of those whose ticks will be sent on connections that are made now.
    """

    step: int
    epoch: int
    plan: Plan
    first_step: int


@dataclass(frozen=True, slots=True)
class CloseConnections:
    """Close all connections to servers."""

    why: str


@dataclass(frozen=True, slots=True)
class SendTick:
    """Send the rank's rows of a tick, then call :meth:`StepMachine.under_way` or
    :meth:`StepMachine.server_failed`.

    Attributes:
        only_rows: it is complete, and others need its rows: what comes back is of no use, and
            nothing is reported.
    """

    tick: Tick
    epoch: int
    only_rows: bool = False


@dataclass(frozen=True, slots=True)
class ReportReplay:
    """Call :meth:`RankMachine.replay_sent`."""

    step: int
    epoch: int


@dataclass(frozen=True, slots=True)
class EndLane:
    """Report to servers that this rank sends nothing of the lane of ``first`` any more, from it
    on."""

    first: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class TakeIn:
    """Put the replies to a tick where they belong: it is complete."""

    tick: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class LetGo:
    """Drop the replies to a tick, whether they have arrived or not."""

    tick: Tick
    epoch: int


@dataclass(frozen=True, slots=True)
class ForgetQueries:
    """Keep no inputs of a complete tick but those that others may need."""

    tick: Tick


@dataclass(frozen=True, slots=True)
class ForgetInputs:
    """Keep no inputs of a complete tick: nobody can ask for them again."""

    tick: Tick


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Answer a recovery."""

    epoch: int
    steps: tuple[Progress, ...]


@dataclass(frozen=True, slots=True)
class ReportLost(Generic[Cause]):
    """Report the loss of a server to the control plane."""

    server_id: str
    epoch: int
    cause: Cause
    detail: str


@dataclass(frozen=True, slots=True)
class ReportGivenUp:
    """Report to the control plane that this rank does not run a step to its end."""

    step: int
    why: str


@dataclass(frozen=True, slots=True)
class CountRecovery:
    """A step goes on under another plan, ``seconds`` after it was left without one."""

    step: int
    epoch: int
    seconds: float
    replayed: tuple[Tick, ...]


Instruction: TypeAlias = (
    SendTick
    | TakeIn
    | LetGo
    | ForgetQueries
    | ForgetInputs
    | EndLane
    | DeriveAhead[Plan]
    | PlanOwnServer[Plan]
    | Connect[Plan]
    | ReportReplay
    | CountRecovery
    | CloseConnections
    | RecoverOwnServer
    | AbandonOwnServer
    | ReportProgress
    | ReportLost[Cause]
    | ReportGivenUp
)
