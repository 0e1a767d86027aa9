"""Whether ranks can be divided as settings ask for, found out before any of them starts."""

from __future__ import annotations

from distca.shapes import configured_shape, local_shape
from distca.train.model import model_config
from distca.train.parallelism import Parallelism
from distca.train.pipeline_layout import pipeline_layout
from distca.train.settings import ModelSettings, TrainingSettings
from distca.train.tensor_parallel import check_plan


def check_division(model: ModelSettings, training: TrainingSettings, n_ranks: int) -> None:
    """Checks how ``n_ranks`` trainers share the layers and heads of ``model``.

    Raises:
        SettingsError: the ranks, layers or heads cannot be divided so, or the schedule is of no
            use.
        ModelConfigError: the model cannot be used, or not with tensor parallelism.
        ValueError: the model's sizes make no valid shape.
    """
    parallelism = Parallelism.of(training, n_ranks)
    # Documents have no part in it: the trainers check how long they may be.
    config = model_config(model, max_positions=1)
    pipeline_layout(training, parallelism.n_replicas, config.num_hidden_layers)
    check_plan(config, training.tensor_parallel)
    local_shape(configured_shape(model), training.tensor_parallel)
