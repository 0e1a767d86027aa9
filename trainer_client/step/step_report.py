"""What a rank measured in one step, in numbers and on a time line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TraceEvent:
    """Something that took time in a step.

    Attributes:
        lane: where: ``"nano-batch 0"``, ``"in-place server"``, ...
        name: what: ``"compute"``, ``"wait"``, ``"send"``, ``"kernel"``, ``"edge keys"``.
        begin_seconds, end_seconds: since the step began.
        detail: layer and phase, in words.
    """

    lane: str
    name: str
    begin_seconds: float
    end_seconds: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What a rank measured in one step.

    Attributes:
        step: which.
        tokens: of this rank.
        step_seconds: wall seconds from the plan's arrival to the end of the step.
        plan_wait_seconds: wall seconds that the step waited for its plan.
        wait_seconds: of ``step_seconds``, in which the rank's thread was blocked on results of core
            attention.
        exposed_seconds: of ``step_seconds``, in which nothing was computed because of that. The
            same on a CPU. A GPU computes what was launched before while the thread is blocked, so
            there events in its stream tell; None if it did not come to them in time.
        send_seconds: of ``step_seconds``, spent packing and handing over requests.
        sent_bytes, received_bytes: to and from other processes.
        recoveries: how often another plan was put in force in the middle of the step.
        replayed_ticks: sent again under another plan.
        recovery_seconds: wall seconds without a plan in force, all recoveries together.
        edge_wait_seconds: of ``step_seconds``, in which the rank's thread was blocked on edge keys
            of layers at home, or on their gradients, from other ranks.
    """

    step: int
    tokens: int
    step_seconds: float
    plan_wait_seconds: float
    wait_seconds: float
    exposed_seconds: float | None
    send_seconds: float
    sent_bytes: int
    received_bytes: int
    recoveries: int = 0
    replayed_ticks: int = 0
    recovery_seconds: float = 0.0
    edge_wait_seconds: float = 0.0
