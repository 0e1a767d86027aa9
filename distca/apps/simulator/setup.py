"""The subject of a simulation: a model on a cluster, its parallelism, the seconds of its parts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from core_attention.ca_task import Phase
from core_attention.cost_model import CostProfile
from core_attention.schedule import Kind, Schedule
from distca.apps.simulator.cluster import ClusterSpec
from distca.apps.simulator.model import ModelSpec
from distca.apps.simulator.profile import rank_profile
from distca.contract.checks import check_least

_MATRIX_PRODUCTS = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.BACKWARD_INPUT: 1,
    Kind.BACKWARD_WEIGHT: 1,
}
"""Those of a linear layer, in units of its forward pass."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training job on a cluster. The ranks form ``n_pipelines`` pipelines of ``n_stages``.

    Attributes:
        model: layers and widths.
        cluster: GPUs and links.
        profile: measured kernel cost of one GPU, for any heads; it is scaled to the model's.
        tokens_per_rank: tokens of one microbatch of one pipeline.
        n_stages: pipeline stages; 1 is without pipeline parallelism.
        n_microbatches: of each pipeline in a step (gradient accumulation without pipelines).
        recompute_linear: whether the backward pass runs the linear layers' forward again.
        gradient_sync_seconds: what each step adds for the gradients, the same for every method.
    """

    model: ModelSpec
    cluster: ClusterSpec
    profile: CostProfile
    tokens_per_rank: int
    n_stages: int = 1
    n_microbatches: int = 1
    recompute_linear: bool = False
    gradient_sync_seconds: float = 0.0

    def __post_init__(self) -> None:
        check_least(self, tokens_per_rank=1, n_stages=1, n_microbatches=1, gradient_sync_seconds=0)
        if self.cluster.n_ranks % self.n_stages:
            raise ValueError(
                f"{self.cluster.n_ranks} ranks ({self.cluster.n_gpus} GPUs, "
                f"{self.cluster.tensor_parallel} a rank) cannot form pipelines of {self.n_stages} "
                "stages: n_stages must divide the ranks"
            )
        if self.model.n_layers % self.n_stages:
            raise ValueError(
                f"{self.model.n_layers} layers cannot be divided over {self.n_stages} stages: "
                "n_stages must divide them"
            )

    @property
    def n_pipelines(self) -> int:
        """Data-parallel replicas of the model."""
        return self.cluster.n_ranks // self.n_stages

    @property
    def step_tokens(self) -> int:
        return self.n_pipelines * self.n_microbatches * self.tokens_per_rank

    @property
    def layers_per_stage(self) -> int:
        return self.model.n_layers // self.n_stages

    @cached_property
    def rank_profile(self) -> CostProfile:
        """Kernel cost of one rank for the model's heads."""
        return rank_profile(self.profile, self.model.attention_shape, self.cluster.tensor_parallel)

    def linear_seconds_per_token(self, phase: Phase) -> float:
        """Seconds of one layer's linear part for one token on one rank.

        The output head is divided evenly over the layers, as if stages were cut to be equal.
        """
        return self.action_seconds_per_token(
            Kind.FORWARD if phase is Phase.FORWARD else Kind.BACKWARD
        )

    def action_seconds_per_token(self, kind: Kind) -> float:
        """The same for an action of a pipeline schedule."""
        model = self.model
        flops = model.linear_flops_per_token + model.head_flops_per_token / model.n_layers
        passes = _MATRIX_PRODUCTS[kind]
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            passes += self.recompute_linear
        rate = self.cluster.linear_flops_per_second * self.cluster.tensor_parallel
        return flops * passes / rate


def stage_layers(setup: Setup, schedule: Schedule) -> int:
    """Layers of each stage of ``schedule``.

    Raises:
        ValueError: the stages cannot have equally many.
    """
    if setup.model.n_layers % schedule.n_stages:
        raise ValueError(
            f"{setup.model.n_layers} layers cannot be divided over the {schedule.n_stages} stages "
            f"of schedule {schedule.name}"
        )
    return setup.model.n_layers // schedule.n_stages
