"""Plans: the server of every CA-task of a step, forward and backward, and why."""

from __future__ import annotations

from dataclasses import InitVar, dataclass
from enum import StrEnum
from functools import cached_property

import numpy as np

from core_attention.arrays import Float64Array, Int64Array, frozen
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.errors import PlanError
from core_attention.manifest import Manifest

AT_HOME = "home"
"""The planner of plans that take no planning: documents stay whole on their ranks."""

PROMISE = 0.02
"""The factor by which a plan may exceed its tolerance and still keep it: cuts are aligned, and the
level itself depends on them."""


class PlanVerdict(StrEnum):
    """The verdict on a plan's tolerance, and what is known of why not. The worst phase counts."""

    KEPT = "kept"
    """No server is more than tolerance + 0.02 above the level, at which all would finish."""
    INDIVISIBLE = "indivisible"
    """One is, and no plan can do better: the shortest piece of some document takes longer."""
    LIMITED = "limited"
    """One is, and memory or byte limits were set."""
    MISSED = "missed"
    """One is, and the planner found nothing better."""

    @classmethod
    def of_imbalance(cls, imbalance: float, tolerance: float) -> PlanVerdict:
        """The verdict where no more is known of a plan than its imbalance, 1.0 being perfect."""
        return cls.KEPT if imbalance <= 1.0 + tolerance + PROMISE else cls.MISSED


@dataclass(frozen=True)
class PlanServer:
    """A server as a plan names it.

    Attributes:
        server_id: unique in the control plane.
        in_place_rank: the rank whose process it shares, or None for a pool server.
        address: ``host:port`` of its data plane.
    """

    server_id: str
    in_place_rank: int | None
    address: str


@dataclass(frozen=True, eq=False)
class PhaseForecast:
    """The planner's forecast of one phase of a step, for each nano-batch.

    Attributes:
        home_seconds: ``[n_nano_batches, n_ranks]`` busy seconds if nothing moved.
        seconds: ``[n_nano_batches, n_servers]`` busy seconds under the plan.
        q_rows: ``[n_nano_batches, n_servers]`` query rows of each server's tasks.
        kv_rows: ``[n_nano_batches, n_servers]`` distinct key/value rows each server holds.
        bytes_in: ``[n_nano_batches, n_servers]`` bytes that arrive at each server in a tick from
            other processes, in one layer.
        bytes_out: ``[n_nano_batches, n_servers]`` bytes that each server sends back.
    """

    home_seconds: Float64Array
    seconds: Float64Array
    q_rows: Int64Array
    kv_rows: Int64Array
    bytes_in: Int64Array
    bytes_out: Int64Array

    def __post_init__(self) -> None:
        for name in ("home_seconds", "seconds"):
            object.__setattr__(self, name, frozen(np.array(getattr(self, name), np.float64)))
        for name in ("q_rows", "kv_rows", "bytes_in", "bytes_out"):
            object.__setattr__(self, name, frozen(np.array(getattr(self, name), np.int64)))

    @property
    def home_imbalance(self) -> float:
        """Worst over nano-batches of max / mean busy seconds if nothing moved."""
        return imbalance(self.home_seconds)

    @property
    def predicted_imbalance(self) -> float:
        """Worst over nano-batches of max / mean busy seconds under the plan."""
        return imbalance(self.seconds)


@dataclass(frozen=True, eq=False, kw_only=True)
class SlotForecast:
    """The planner's forecast of each slot of a pipeline schedule, all layers, for each half of
    the microbatches (one where a microbatch is one nano-batch).

    Attributes:
        home_seconds: ``[n_halves, n_slots, n_ranks]`` busy seconds if nothing moved.
        base_seconds: ``[n_halves, n_slots, n_servers]`` seconds beside core attention; halves are
            equal parts of their microbatch.
        seconds: ``[n_halves, n_slots, n_servers]`` busy seconds under the plan, both together.
    """

    home_seconds: Float64Array
    base_seconds: Float64Array
    seconds: Float64Array

    def __post_init__(self) -> None:
        for name in ("home_seconds", "base_seconds", "seconds"):
            object.__setattr__(self, name, frozen(np.array(getattr(self, name), np.float64)))

    @cached_property
    def level_seconds(self) -> Float64Array:
        """``[n_halves, n_slots]`` when a perfect plan on equal servers would end."""
        attention = (self.seconds - self.base_seconds).sum(axis=2)
        return level_seconds(self.base_seconds, attention)

    @property
    def imbalance(self) -> Float64Array:
        """``[n_slots]`` busiest server's seconds / level, the worst half; 1.0 where nothing is to
        do."""
        level = self.level_seconds
        worst = self.seconds.max(axis=2) / np.where(level > 0, level, 1.0)
        return np.asarray(np.where(level > 0, worst, 1.0).max(axis=0))

    @property
    def step_imbalance(self) -> float:
        """The factor by which the slots together take longer than their levels."""
        return self._over_levels(self.seconds)

    @property
    def home_imbalance(self) -> float:
        """The same if nothing moved."""
        return self._over_levels(self.home_seconds)

    def measured(self, attention_seconds: Float64Array) -> SlotForecast:
        """The seconds of the slots by what servers measured of the whole step.

        A server runs tasks of several slots side by side, so each one's seconds are spread over the
        slots as the planner expected them.

        Args:
            attention_seconds: ``[n_servers]`` busy with core attention in the step.
        """
        expected = self.seconds - self.base_seconds
        total = expected.sum(axis=(0, 1))
        scale = np.where(total > 0, attention_seconds / np.where(total > 0, total, 1.0), 0.0)
        return SlotForecast(
            home_seconds=self.home_seconds,
            base_seconds=self.base_seconds,
            seconds=self.base_seconds + expected * scale,
        )

    def measured_imbalance(self, attention_seconds: Float64Array) -> float:
        """``step_imbalance`` of :meth:`measured`."""
        return self.measured(attention_seconds).step_imbalance

    def _over_levels(self, seconds: Float64Array) -> float:
        level = float(self.level_seconds.sum())
        return float(seconds.max(axis=2).sum()) / level if level else 1.0


@dataclass(frozen=True, eq=False, kw_only=True)
class Plan:
    """The server of every CA-task of one step: a pure function of manifest, servers and options.

    Attributes:
        manifest: the step's documents and homes, or the slice that one member needs.
        epoch: raised when a step is planned again.
        servers: what the tasks' server indices mean.
        forward, backward: the CA-tasks of each phase; they may be cut differently.
        mask: the mask of every task.
        planner: name of the planner that made it.
        reason: in words, what bounds the plan and why the planner stopped.
        forward_forecast, backward_forecast: predicted load; None in a slice.
        slots: predicted load of each slot of a job's pipelines; None without them, and in a slice.
        verdict: whether the tolerance is kept; None where a plan does not say.
    """

    manifest: Manifest
    epoch: int
    servers: tuple[PlanServer, ...]
    forward: TaskTable
    backward: TaskTable
    mask: MaskKind
    planner: str
    reason: str
    forward_forecast: PhaseForecast | None = None
    backward_forecast: PhaseForecast | None = None
    slots: SlotForecast | None = None
    verdict: PlanVerdict | None = None
    tasks_are_valid: InitVar[bool] = False
    """Returns whether who makes the plan has checked the tasks; if not, they are checked here."""

    def __post_init__(self, tasks_are_valid: bool) -> None:
        if len({server.server_id for server in self.servers}) != len(self.servers):
            names = [server.server_id for server in self.servers]
            raise PlanError(f"servers appear twice: {names}")
        if {self.forward.mask, self.backward.mask} != {self.mask}:
            raise PlanError(
                f"the plan's mask is {self.mask.name}, its tasks' are {self.forward.mask.name} "
                f"forward and {self.backward.mask.name} backward; they must be the same"
            )
        if not tasks_are_valid:
            self.forward.check(self.manifest, len(self.servers))
            self.backward.check(self.manifest, len(self.servers))

    @property
    def step(self) -> int:
        return self.manifest.step

    def tasks(self, phase: Phase) -> TaskTable:
        """The CA-tasks of ``phase``."""
        return self.forward if phase is Phase.FORWARD else self.backward

    def forecast(self, phase: Phase) -> PhaseForecast | None:
        """The predicted load of ``phase``."""
        return self.forward_forecast if phase is Phase.FORWARD else self.backward_forecast

    def home_imbalance(self, phase: Phase) -> float | None:
        """Busiest over mean if nothing moved, the worst nano-batch; of pipelines
        ``SlotForecast.home_imbalance`` of both phases together. None in a slice."""
        if self.slots is not None:
            return self.slots.home_imbalance
        forecast = self.forecast(phase)
        return forecast.home_imbalance if forecast else None

    def predicted_imbalance(self, phase: Phase) -> float | None:
        """The same under the plan."""
        if self.slots is not None:
            return self.slots.step_imbalance
        forecast = self.forecast(phase)
        return forecast.predicted_imbalance if forecast else None

    def server_index(self, server_id: str) -> int | None:
        """Index of ``server_id`` in ``servers``, or None if the plan does not name it."""
        for index, server in enumerate(self.servers):
            if server.server_id == server_id:
                return index
        return None


def imbalance(seconds: Float64Array) -> float:
    """Max over the last axis / mean, the worst row of it; 1.0 where nothing is to do."""
    rows = seconds.reshape(-1, seconds.shape[-1])
    means = [(row, float(row.sum()) / len(row)) for row in rows]
    worst = [float(row.max()) / mean for row, mean in means if mean > 0]
    if len(worst) == 1:
        return worst[0]
    return float(np.max(worst)) if worst else 1.0


def level_seconds(base_seconds: Float64Array, work_seconds: Float64Array) -> Float64Array:
    """When equal servers that are busy for ``base_seconds`` anyway would finish ``work_seconds`` of
    attention, divided at will; never before the last of them ends its base.

    Args:
        base_seconds: ``[..., n_servers]``.
        work_seconds: ``[...]`` of all together.

    Returns:
        ``[...]``.
    """
    base = np.sort(base_seconds, axis=-1)
    n = np.arange(1, base.shape[-1] + 1)
    filled = (np.asarray(work_seconds)[..., np.newaxis] + np.cumsum(base, axis=-1)) / n
    reached = np.concatenate([base[..., 1:], np.full((*base.shape[:-1], 1), np.inf)], axis=-1)
    at = np.argmax(filled <= reached, axis=-1)[..., np.newaxis]
    level = np.take_along_axis(filled, at, axis=-1)[..., 0]
    return np.maximum(level, base[..., -1])
