"""The terms that all ranks of a job agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

from control_plane.errors import InvalidRequestError
from control_plane.jobs.membership import checked_id
from control_plane.planner.planning import PlanningOptions
from core_attention.errors import PlanError, ScheduleError
from core_attention.pipelining import Pipelining
from core_attention.shape import AttentionShape
from core_attention.tick import MAX_LAYERS, MAX_NANO_BATCHES

MAX_RANKS = 2**16


class JobPlacement(IntEnum):
    """The servers that a job uses. Numbered as in ``distca/v1/jobs.proto``."""

    POOL = 1
    IN_PLACE = 2
    MIXED = 3

    @property
    def uses_pool(self) -> bool:
        return self is not JobPlacement.IN_PLACE

    @property
    def uses_in_place(self) -> bool:
        return self is not JobPlacement.POOL


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """The terms that all ranks of a job agree on.

    Attributes:
        name: of the job; one open job has it at a time.
        n_ranks: data-parallel ranks.
        n_layers: ticks of one forward in a lane.
        n_nano_batches: of every rank, in every step.
        shape: heads, head dims and dtype of a tick.
        placement: which servers serve it.
        options: tolerance and cuts.
        planner: name of the planner; empty for the default.
        softmax_scale: multiplies q.k before the softmax; 0 is 1 / sqrt(head_dim).
        checksums: messages carry one; None: those that leave their host.
        transport: what moves the rows, for example ``"ucxx"``; empty if the ranks do not say.
        pipelining: of ranks that form pipelines; None without.
        head_groups: ticks of one attention call.
        windows: of each attention call, the keys that a query sees at most, 0 for all; or empty.
    """

    name: str
    n_ranks: int
    n_layers: int
    n_nano_batches: int
    shape: AttentionShape
    placement: JobPlacement
    options: PlanningOptions
    planner: str = ""
    softmax_scale: float = 0.0
    checksums: bool | None = None
    transport: str = ""
    pipelining: Pipelining | None = None
    head_groups: int = 1
    windows: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        checked_id("name", self.name)
        for field_name, highest in (
            ("n_ranks", MAX_RANKS),
            ("n_layers", MAX_LAYERS),
            ("n_nano_batches", MAX_NANO_BATCHES),
            ("head_groups", self.n_layers),
        ):
            value = getattr(self, field_name)
            if not 1 <= value <= highest:
                raise InvalidRequestError(
                    f"job {self.name}: {field_name} is {value}; valid are 1 to {highest}"
                )
        n_calls = self.n_layers // self.head_groups
        if len(self.windows) not in (0, n_calls):
            raise InvalidRequestError(
                f"job {self.name}: windows has {len(self.windows)}; give one for each of {n_calls} "
                "calls, or none"
            )
        if self.transport:
            checked_id("transport", self.transport)
        if self.pipelining is not None:
            try:
                self.pipelining.check_job(self.n_ranks, self.n_layers, self.n_nano_batches)
            except ScheduleError as error:
                raise InvalidRequestError(f"job {self.name}: {error}") from error
        if not (math.isfinite(self.softmax_scale) and self.softmax_scale >= 0):
            raise InvalidRequestError(
                f"job {self.name}: softmax_scale is {self.softmax_scale}; it must be positive, or "
                "0 for 1 / sqrt(head_dim)"
            )

    @property
    def scale(self) -> float:
        """The factor on q.k before the softmax."""
        return self.softmax_scale or self.shape.default_softmax_scale

    def differences(self, other: JobSpec) -> str:
        """The fields in which ``other`` differs, with both values; empty if there are none."""
        return ", ".join(
            _difference(field.name, own, theirs)
            for field in fields(self)
            if (own := getattr(self, field.name)) != (theirs := getattr(other, field.name))
        )


def _difference(name: str, own: Any, theirs: Any) -> str:
    if isinstance(own, Pipelining) and isinstance(theirs, Pipelining):
        # In words, two of them may look the same.
        return f"{name}: {own.differences(theirs)}"
    return f"{name} {theirs} instead of {own}"


def planning_options(
    *, tolerance: float, min_forward_tokens: int, min_backward_tokens: int
) -> PlanningOptions:
    """The options of a job; token numbers of 0 stand for the defaults."""
    defaults = PlanningOptions()
    try:
        return PlanningOptions(
            tolerance=tolerance,
            min_forward_tokens=min_forward_tokens or defaults.min_forward_tokens,
            min_backward_tokens=min_backward_tokens or defaults.min_backward_tokens,
        )
    except PlanError as error:
        raise InvalidRequestError(str(error)) from error
