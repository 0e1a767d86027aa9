"""How the ranks of a run are divided: replicas of the model, stages of it, shares of its heads."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distca.errors import SettingsError
from distca.train.settings import Sharding, TrainingSettings

REPLICA, ALONE, STAGE, TENSOR = "replica", "alone", "stage", "tensor"
"""Dimensions of the mesh. ``ALONE`` has one rank, over which weights are sharded that replicas have
whole."""


@dataclass(frozen=True)
class Parallelism:
    """Rank ``(replica * pipeline_stages + r) * tensor_parallel + t`` is tensor-parallel rank t of
    rank r of a pipeline.

    Attributes:
        n_ranks: of the run.
        pipeline_stages: ranks of a pipeline.
        tensor_parallel: ranks that share each layer.
    """

    n_ranks: int
    pipeline_stages: int = 1
    tensor_parallel: int = 1

    @classmethod
    def of(cls, training: TrainingSettings, n_ranks: int) -> Parallelism:
        """What ``training`` asks for.

        Raises:
            SettingsError: the ranks cannot be divided so, or layers that are shared would be
                compiled.
        """
        stages, shares = training.pipeline_stages, training.tensor_parallel
        if shares > 1 and training.compile_layers:
            raise SettingsError(
                f"--compile-layers with --tensor-parallel {shares}: layers whose weights are "
                "spread over ranks are not compiled; leave one of both out"
            )
        if n_ranks % (stages * shares):
            asked = [f"--pipeline-stages is {stages}"] * (stages > 1)
            asked += [f"--tensor-parallel is {shares}"] * (shares > 1)
            said = " and ".join([*asked, f"there are {n_ranks} ranks"])
            raise SettingsError(
                f"{said}; their number must be a multiple of {stages * shares}, the ranks that "
                "hold one replica of the model"
            )
        return cls(n_ranks, stages, shares)

    @property
    def copies(self) -> int:
        """Ranks that hold the same documents: those of a replica."""
        return self.pipeline_stages * self.tensor_parallel

    @property
    def n_replicas(self) -> int:
        """Of the whole model."""
        return self.n_ranks // self.copies

    def replica(self, rank: int) -> int:
        """The replica that ``rank`` is a part of."""
        return rank // self.copies

    def pipeline_rank(self, rank: int) -> int:
        """Its place in its pipeline."""
        return rank % self.copies // self.tensor_parallel

    def group(self, rank: int) -> range:
        """The ranks of its tensor-parallel group, in order; empty without."""
        if self.tensor_parallel == 1:
            return range(0)
        first = rank - rank % self.tensor_parallel
        return range(first, first + self.tensor_parallel)

    def mesh(self, device_type: str) -> DeviceMesh:
        """All ranks, with the dimensions of this module; all of them make it together."""
        sizes = (self.n_replicas, 1, self.pipeline_stages, self.tensor_parallel)
        return init_device_mesh(device_type, sizes, mesh_dim_names=(REPLICA, ALONE, STAGE, TENSOR))


def replica_mesh(mesh: DeviceMesh, training: TrainingSettings) -> DeviceMesh:
    """Over which ``fully_shard`` shards weights, or keeps them whole on every replica, as
    ``training`` asks for."""
    return mesh[REPLICA] if training.sharding is Sharding.FSDP else mesh[REPLICA, ALONE]
