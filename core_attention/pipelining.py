"""The pipelines of a job: which rank runs what and when, and what it computes beside attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from core_attention.errors import ScheduleError
from core_attention.schedule import Kind, Schedule, Slot, side_by_side

LEAST_SECONDS, MOST_SECONDS = 1e-18, 1e6
"""The range of what a token takes through a stage, far beyond any model. They come from another
process, and planners add them up and divide by them: neither may leave the range of numbers."""

MOST_SLOTS = 100
"""The range of an action, in slots of a forward: so many more slots there are to plan. A backward
that recomputes everything takes three."""


@dataclass(frozen=True, kw_only=True)
class Pipelining:
    """The facts that all ranks of a job with pipelines agree on.

    Attributes:
        schedule: what each rank of a pipeline runs.
        pipeline_ranks: ``[n_ranks]`` each rank's place in its pipeline, a rank of ``schedule``.
        layers: ``[n_stages]`` calls of core attention in one forward of each stage that are served;
            0 of a stage that has none, as where it only embeds or all its layers have a window.
        forward_seconds: ``[n_stages]`` seconds that one token takes through each stage beside core
            attention, forward; :data:`LEAST_SECONDS` to :data:`MOST_SECONDS`.
        backward_seconds: the same, backward, recomputation included; over all stages up to
            :data:`MOST_SLOTS` times those. Of a backward in two parts,
            gradients of weights take as long as the forward, but half of the backward at most:
            they are as many products of the same sizes.
    """

    schedule: Schedule
    pipeline_ranks: Sequence[int]
    layers: Sequence[int]
    forward_seconds: Sequence[float]
    backward_seconds: Sequence[float]

    def __post_init__(self) -> None:
        for name in ("pipeline_ranks", "layers", "forward_seconds", "backward_seconds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        n_stages, n_ranks = self.schedule.n_stages, self.schedule.n_ranks
        for name in ("layers", "forward_seconds", "backward_seconds"):
            given = len(getattr(self, name))
            if given != n_stages:
                raise ScheduleError(
                    f"{name} has {given} values; schedule {self.schedule.name} has {n_stages} "
                    "stages, and each needs one"
                )
        for stage, layers in enumerate(self.layers):
            if layers < 0:
                raise ScheduleError(
                    f"layers of stage {stage} is {layers}; a stage has 0 or more calls of core "
                    "attention that are served"
                )
        if not any(self.layers):
            raise ScheduleError(
                f"layers is {_shortened(self.layers)}; servers would have nothing to do: one stage "
                "at least has a call of core attention that is served"
            )
        for name in ("forward_seconds", "backward_seconds"):
            for stage, seconds in enumerate(getattr(self, name)):
                if not LEAST_SECONDS <= seconds <= MOST_SECONDS:
                    raise ScheduleError(
                        f"{name} of stage {stage} is {seconds}; it must be a number of "
                        f"{LEAST_SECONDS:g} to {MOST_SECONDS:g}"
                    )
        forward, backward = sum(self.forward_seconds), sum(self.backward_seconds)
        if backward > MOST_SLOTS * forward:
            raise ScheduleError(
                f"backward_seconds are {backward:g} over all stages and forward_seconds "
                f"{forward:g}; a backward takes {MOST_SLOTS} times as long as a forward at most: "
                "measure both again"
            )
        held = [self.pipeline_ranks.count(rank) for rank in range(n_ranks)]
        if sum(held) != len(self.pipeline_ranks) or len(set(held)) != 1 or not held[0]:
            raise ScheduleError(
                f"pipeline_ranks is {_shortened(self.pipeline_ranks)}; each of the ranks 0 to "
                f"{n_ranks - 1} of schedule {self.schedule.name} must be there equally often"
            )

    def check_job(self, n_ranks: int, n_layers: int, n_nano_batches: int) -> None:
        """Checks that it fits a job."""
        if len(self.pipeline_ranks) != n_ranks:
            raise ScheduleError(
                f"pipeline_ranks has {len(self.pipeline_ranks)} values; the job has n_ranks="
                f"{n_ranks}, and each needs one"
            )
        if n_layers != self.max_layers:
            own = [self.layers_of_pipeline_rank(rank) for rank in range(self.schedule.n_ranks)]
            raise ScheduleError(
                f"n_layers is {n_layers}; the ranks of a pipeline have {_shortened(own)} layers in "
                f"their stages: set n_layers to the most, {self.max_layers}"
            )
        if n_nano_batches % self.schedule.n_microbatches:
            raise ScheduleError(
                f"n_nano_batches is {n_nano_batches}; schedule {self.schedule.name} has "
                f"{self.schedule.n_microbatches} microbatches, of which each is one nano-batch or "
                "several"
            )

    def __str__(self) -> str:
        schedule = self.schedule
        return (
            f"{schedule.name} of {schedule.n_stages} stages on {schedule.n_ranks} ranks and "
            f"{schedule.n_microbatches} microbatches, layers {_shortened(self.layers)}"
        )

    def differences(self, other: Pipelining) -> str:
        """The fields in which ``other`` differs, with both values; empty if there are none."""
        found = [
            f"{name} {_shortened(getattr(other, name))} instead of {_shortened(own)}"
            for name in ("pipeline_ranks", "layers", "forward_seconds", "backward_seconds")
            if (own := getattr(self, name)) != getattr(other, name)
        ]
        if self.schedule != other.schedule:
            found.insert(0, f"schedule {_first_difference(self.schedule, other.schedule)}")
        return ", ".join(found)

    @property
    def n_pipelines(self) -> int:
        """Replicas of the model."""
        return len(self.pipeline_ranks) // self.schedule.n_ranks

    @cached_property
    def max_layers(self) -> int:
        """Calls of core attention on the rank that has most."""
        return max(self.layers_of_pipeline_rank(rank) for rank in range(self.schedule.n_ranks))

    def layers_of_pipeline_rank(self, pipeline_rank: int) -> int:
        """Calls of core attention in all stages of one rank of a pipeline."""
        places = self.schedule.rank_of_stage
        return sum(n for n, at in zip(self.layers, places, strict=True) if at == pipeline_rank)

    def layers_of(self, rank: int) -> int:
        """The same of one rank of the job."""
        return self.layers_of_pipeline_rank(self.pipeline_ranks[rank])

    @cached_property
    def rank_layers(self) -> tuple[int, ...] | None:
        """``[n_ranks]`` the same of all ranks of the job; None if they are equal."""
        layers = tuple(self.layers_of(rank) for rank in range(len(self.pipeline_ranks)))
        return layers if len(set(layers)) > 1 else None

    def job_layers(self, stage: int) -> range:
        """The job's layers that a stage's calls are: those of a rank's stages follow one another
        and end with the job's last, so that the lanes of all ranks turn at one place."""
        rank = self.schedule.rank_of_stage[stage]
        above = [
            layers
            for other, layers in enumerate(self.layers)
            if other >= stage and self.schedule.rank_of_stage[other] == rank
        ]
        begin = self.max_layers - sum(above)
        return range(begin, begin + self.layers[stage])

    def seconds(self, stage: int, kind: Kind) -> float:
        """Seconds of one token in an action of ``stage`` beside core attention."""
        forward, backward = self.forward_seconds[stage], self.backward_seconds[stage]
        weights = min(forward, backward / 2)
        return {
            Kind.FORWARD: forward,
            Kind.BACKWARD: backward,
            Kind.BACKWARD_INPUT: backward - weights,
            Kind.BACKWARD_WEIGHT: weights,
        }[kind]

    @cached_property
    def kind_slots(self) -> dict[Kind, int]:
        """Slots that an action of each kind takes, in proportion to its mean seconds; 1 where the
        schedule keeps ranks in step."""
        if self.schedule.keeps_in_step:
            return dict.fromkeys(Kind, 1)
        stages = range(self.schedule.n_stages)
        total = {kind: sum(self.seconds(stage, kind) for stage in stages) for kind in Kind}
        return {kind: max(1, round(total[kind] / total[Kind.FORWARD])) for kind in Kind}

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        """The actions that run side by side, in slots of equal length; see :func:`side_by_side`."""
        return side_by_side(self.schedule, self.kind_slots)


def _first_difference(own: Schedule, other: Schedule) -> str:
    """The difference of ``other`` from ``own``, in words."""
    sizes = [
        f"{each.name} of {each.n_stages} stages on {each.n_ranks} ranks and "
        f"{each.n_microbatches} microbatches"
        for each in (other, own)
    ]
    if sizes[0] != sizes[1]:
        return " instead of ".join(sizes)
    for at, slots in enumerate(zip_longest(other.slots, own.slots)):
        for rank, actions in enumerate(
            zip(*(slot or (None,) * own.n_ranks for slot in slots), strict=True)
        ):
            if actions[0] != actions[1]:
                first, second = (action or "nothing" for action in actions)
                return f"{own.name} with {first} instead of {second} in slot {at} of rank {rank}"
    return own.name


def _shortened(values: Sequence[float], most: int = 16) -> str:
    text = ", ".join(map(str, values[:most]))
    return f"[{text}, ...]" if len(values) > most else f"[{text}]"
