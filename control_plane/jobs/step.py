"""The records of one training step: manifests coming in, the plan, what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal

import numpy as np

from control_plane.jobs.slicing import PlanSlicer
from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import Plan, imbalance
from distca.v1 import jobs_pb2
from distca.v1.jobs_pb2 import RankMeasurement, ServerMeasurement

MAX_MISSING = 64
"""Ranks that are named, of those whose manifest is missing."""


def busy_seconds(measured: ServerMeasurement, phase: Phase) -> Sequence[float]:
    """Kernel seconds of a server in ``phase``, per nano-batch."""
    if phase is Phase.FORWARD:
        return measured.forward_busy_seconds
    return measured.backward_busy_seconds


@dataclass
class PendingStep:
    """A step whose manifests are coming in."""

    manifests: dict[int, RankManifest] = field(default_factory=dict)
    forward_only: dict[int, bool] = field(default_factory=dict)

    def missing(self, n_ranks: int) -> list[int]:
        """The ranks that have not handed in theirs, the first :data:`MAX_MISSING` of them."""
        missing = (rank for rank in range(n_ranks) if rank not in self.manifests)
        return list(islice(missing, MAX_MISSING))


@dataclass(frozen=True, kw_only=True)
class ReadyStep:
    """A step that can be planned.

    Attributes:
        manifests: of every rank, in rank order; empty if ``manifest`` is there.
        manifest: of the whole step, if it has been planned before.
        forward_only: the step has no backward pass.
        epoch: of the plan to be made.
        complete_ticks: by rank, then nano-batch, how many ticks of the lane need not be run again;
            empty for a step that nobody has begun.
        left: the ranks that have left the job or given the step up, and which, in words.
        begun: ranks may wait in the middle of it.
        sequences: by rank that has joined it without a number: which of its hand-ins it is.
        without: why some ranks have not joined it; empty if all have.
    """

    step: int
    manifests: tuple[RankManifest, ...] = ()
    manifest: Manifest | None = None
    forward_only: bool
    epoch: int = 0
    complete_ticks: tuple[tuple[int, ...], ...] = ()
    left: Mapping[int, str] = field(default_factory=dict)
    begun: bool = False
    sequences: Mapping[int, int] = field(default_factory=dict)
    without: Literal["", "round", "late"] = ""

    def whole_manifest(self, n_ranks: int) -> Manifest:
        """The manifest of all ranks."""
        return self.manifest or Manifest.merge(self.manifests, n_ranks)


@dataclass(frozen=True)
class FailedStep:
    """A step that cannot be planned, and why."""

    step: int
    error: str


@dataclass(kw_only=True)
class StepRecord:
    """A step with its plan.

    Attributes:
        job_id: of its job.
        plan: the whole plan.
        plan_seconds: wall seconds that it took to make.
        forward_only: the step has no backward pass.
        first_tick: ``[n_documents]`` of the plan: the first tick of the document's lane that runs
            under it; None for a step that nobody had begun.
        speeds: corrections that servers were planned with, by id, where they are not 1.0.
        sequences: as of :class:`ReadyStep`.
        serving: ids of the servers that have a task.
        servers, ranks: what was measured, by server id and rank.
    """

    job_id: str
    plan: Plan
    plan_seconds: float
    forward_only: bool
    first_tick: Int64Array | None = None
    speeds: Mapping[str, float] = field(default_factory=dict)
    sequences: Mapping[int, int] = field(default_factory=dict)
    serving: frozenset[str] = field(init=False)
    servers: dict[str, ServerMeasurement] = field(default_factory=dict)
    ranks: dict[int, RankMeasurement] = field(default_factory=dict)

    def __post_init__(self) -> None:
        busy = np.union1d(self.plan.forward.server, self.plan.backward.server)
        self.serving = frozenset(self.plan.servers[int(i)].server_id for i in busy)

    @property
    def step(self) -> int:
        return self.plan.step

    def rank_event(self, rank: int) -> bytes:
        """The event for a rank; on any thread."""
        return self.numbered(rank, self.slicer.rank_event(rank))

    def numbered(self, rank: int, event: bytes) -> bytes:
        """Says in the event for ``rank`` which of its hand-ins has got the step's number."""
        planned = jobs_pb2.StepPlanned(sequence=self.sequences.get(rank, 0))
        # Encoded messages merge one behind the other.
        return event + jobs_pb2.PlanEvent(step_planned=planned).SerializeToString()

    def server_event(self, server_id: str) -> bytes:
        """The event for a pool server that has a task; on any thread."""
        return self.slicer.server_event(server_id)

    def drop_slicer(self) -> None:
        """Drop what its events are made from."""
        self.__dict__.pop("slicer", None)

    @cached_property
    def slicer(self) -> PlanSlicer:
        """A maker of its events; see :meth:`drop_slicer`."""
        return PlanSlicer(
            self.plan, self.job_id, forward_only=self.forward_only, first_tick=self.first_tick
        )

    @property
    def longest_wait_seconds(self) -> float | None:
        """The longest wait of a rank for core attention; None without reports."""
        told = (rank for rank in self.ranks.values() if rank.HasField("wait_seconds"))
        return max((rank.wait_seconds for rank in told), default=None)

    @property
    def runs_whole(self) -> bool:
        """Return whether all of the step runs under this plan, so that forecasts and measurements
        are of the same work."""
        return self.first_tick is None

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that the step runs."""
        return (Phase.FORWARD,) if self.forward_only else (Phase.FORWARD, Phase.BACKWARD)

    def predicted_seconds(self, measured: ServerMeasurement, n_layers: int) -> float | None:
        """Busy seconds that the plan expects of a server for the layers that it has run, over all
        nano-batches and phases; None if the plan does not name it."""
        phases = [self.predicted_phase_seconds(phase, measured, n_layers) for phase in self.phases]
        known = [seconds for seconds in phases if seconds is not None]
        return sum(known) if known else None

    def predicted_phase_seconds(
        self, phase: Phase, measured: ServerMeasurement, n_layers: int
    ) -> float | None:
        """The same for one phase; None if the plan has no forecast for it either."""
        index, forecast = self.plan.server_index(measured.server_id), self.plan.forecast(phase)
        if index is None or forecast is None:
            return None
        layers: int | Int64Array = n_layers
        if phase is Phase.BACKWARD:
            # A forecast of pipelines is the mean of all layers, of which a lane may have few here.
            by_lane = np.array(measured.backward_layers)
            layers = by_lane if self.plan.slots is None else int(by_lane.max(initial=0))
        return float((forecast.seconds[:, index] * layers).sum())

    def mean_busy_seconds(self, phase: Phase) -> float:
        """Mean kernel seconds of the plan's servers in ``phase``."""
        busy = (sum(busy_seconds(each, phase)) for each in self.servers.values())
        return sum(busy) / len(self.plan.servers)

    def measured_imbalance(self, phase: Phase) -> float | None:
        """Worst over nano-batches of max / mean measured busy seconds over the plan's servers;
        of pipelines ``SlotForecast.measured_imbalance``. None until every server with a task has
        reported, or if a part of the step ran under another plan."""
        if not self.runs_whole or not self.serving <= self.servers.keys():
            return None
        silent = ServerMeasurement()
        servers = [self.servers.get(each.server_id, silent) for each in self.plan.servers]
        slots = self.plan.slots
        if slots is not None:
            busy = [sum(sum(busy_seconds(each, one)) for one in self.phases) for each in servers]
            return None if self.forward_only else slots.measured_imbalance(np.array(busy, float))
        idle: Sequence[float] = (0.0,) * self.plan.manifest.n_nano_batches
        seconds = [busy_seconds(each, phase) or idle for each in servers]
        return imbalance(np.array(seconds, dtype=np.float64).T)
