"""How the ranks of a run form pipelines, and which layers each stage has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from core_attention.errors import ScheduleError
from core_attention.schedule import Schedule, read_csv, write_csv
from core_attention.schedule_orders import SCHEDULES
from distca.errors import SettingsError
from distca.train.settings import TrainingSettings


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Pipelines of equal stages' layers; ranks are as in :class:`distca.train.parallelism`.

    Attributes:
        schedule: what each rank of a pipeline runs.
        layers: ``[n_stages]`` layers of the model in each stage.
        n_replicas: pipelines, each with the whole model.
        tensor_parallel: ranks that share each stage.
    """

    schedule: Schedule
    layers: tuple[int, ...]
    n_replicas: int
    tensor_parallel: int = 1

    @property
    def n_ranks(self) -> int:
        """Of one pipeline."""
        return self.schedule.n_ranks

    @property
    def pipeline_ranks(self) -> list[int]:
        """Of each rank of the job, its place in its pipeline."""
        places = [place for place in range(self.n_ranks) for _ in range(self.tensor_parallel)]
        return places * self.n_replicas

    def stages_of(self, pipeline_rank: int) -> list[int]:
        """The stages of a rank of a pipeline, those of lower layers first."""
        places = self.schedule.rank_of_stage
        return [stage for stage, at in enumerate(places) if at == pipeline_rank]

    def layers_of(self, stage: int) -> range:
        """The layers of a stage."""
        begin = sum(self.layers[:stage])
        return range(begin, begin + self.layers[stage])

    @property
    def identity(self) -> dict[str, object]:
        """What all ranks must agree on."""
        return {"schedule": write_csv(self.schedule), "stage_layers": self.layers}


def pipeline_layout(
    training: TrainingSettings, n_replicas: int, n_layers: int
) -> PipelineLayout | None:
    """The pipelines that ``training`` asks for; None without.

    Args:
        training: the user's choice.
        n_replicas: pipelines.
        n_layers: of the model.

    Raises:
        SettingsError: there is no such schedule, the file cannot be read or holds no valid order,
            or one of other sizes, or a stage has no layer.
    """
    if training.pipeline_stages == 1:
        return None
    schedule = _schedule(training)
    expected = tuple(stage % schedule.n_ranks for stage in range(schedule.n_stages))
    if schedule.rank_of_stage != expected:
        raise SettingsError(
            f"schedule {schedule.name} has its stages on ranks {list(schedule.rank_of_stage)}; "
            f"distca train places them in turn, on {list(expected)}: write the schedule so"
        )
    layers = _layers(training, schedule.n_stages, n_layers)
    return PipelineLayout(
        schedule=schedule,
        layers=layers,
        n_replicas=n_replicas,
        tensor_parallel=training.tensor_parallel,
    )


def _schedule(training: TrainingSettings) -> Schedule:
    name, n_ranks, n = training.schedule, training.pipeline_stages, training.microbatches
    try:
        if name in SCHEDULES:
            return SCHEDULES[name](n_ranks, n)
        if not name.endswith(".csv"):
            raise SettingsError(
                f"--schedule is {name!r}; valid are {', '.join(SCHEDULES)} and CSV files, whose "
                "names end in .csv"
            )
        schedule = read_csv(name, Path(name).read_text())
    except ScheduleError as error:
        raise SettingsError(f"--schedule: {error}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--schedule {name} cannot be read: {error}") from error
    if (schedule.n_ranks, schedule.n_microbatches) != (n_ranks, n):
        raise SettingsError(
            f"--schedule {name} is for {schedule.n_ranks} ranks and {schedule.n_microbatches} "
            f"microbatches; --pipeline-stages is {n_ranks} and --microbatches {n}: give those, or "
            "write another file by distca schedule"
        )
    return schedule


def _layers(training: TrainingSettings, n_stages: int, n_layers: int) -> tuple[int, ...]:
    if not training.stage_layers:
        if n_layers < n_stages:
            raise SettingsError(
                f"the model has {n_layers} layers for {n_stages} stages; every stage needs one or "
                "more: give fewer --pipeline-stages, or a deeper model"
            )
        each, more = divmod(n_layers, n_stages)
        # The last stage has the loss as well.
        return tuple(each + (stage < more) for stage in range(n_stages))
    cells = training.stage_layers.split(",")
    if not all(cell.strip().isdecimal() and int(cell) for cell in cells):
        raise SettingsError(
            f"--stage-layers is {training.stage_layers!r}; it takes a number of 1 or more for each "
            "stage, with commas between, such as 3,3,2"
        )
    layers = tuple(map(int, cells))
    if len(layers) != n_stages or sum(layers) != n_layers:
        raise SettingsError(
            f"--stage-layers gives {sum(layers)} layers to {len(layers)} stages; the model has "
            f"{n_layers} layers, and the schedule {n_stages} stages"
        )
    return layers
