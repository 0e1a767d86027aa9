"""The machines: how many GPUs, how they form ranks, and what their links carry."""

from __future__ import annotations

from dataclasses import dataclass

from distca.contract.checks import check_least, check_positive


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """GPUs grouped into ranks of ``tensor_parallel`` GPUs, which compute as one.

    A rank's linear layers, attention heads and messages are divided evenly among its GPUs, so a
    rank has ``tensor_parallel`` times the speed and the bandwidth of one.

    Attributes:
        n_gpus: GPUs of the job.
        tensor_parallel: GPUs of a rank.
        gpus_per_host: GPUs that share a machine and its fast links.
        gpu_bandwidth_bytes_per_second: of one GPU's network link, in each direction.
        host_bandwidth_bytes_per_second: of one GPU's link to others of its host, each direction
            (ucxx all-to-all over NVLink on 4 H200: 212 GB/s).
        message_latency_seconds: what each message costs both of its ends besides its bytes (half
            of the 44 us that a small ucxx message takes to go and come back, as if messages to
            several peers did not overlap: on the safe side).
        linear_flops_per_second: achieved by one GPU in the linear layers (H200: 600 TFLOP/s).
    """

    n_gpus: int
    tensor_parallel: int = 8
    gpus_per_host: int = 8
    gpu_bandwidth_bytes_per_second: float = 50e9
    host_bandwidth_bytes_per_second: float = 212e9
    message_latency_seconds: float = 22e-6
    linear_flops_per_second: float = 600e12

    def __post_init__(self) -> None:
        check_least(self, n_gpus=1, tensor_parallel=1, gpus_per_host=1, message_latency_seconds=0)
        check_positive(
            self,
            "gpu_bandwidth_bytes_per_second",
            "host_bandwidth_bytes_per_second",
            "linear_flops_per_second",
        )
        if self.n_gpus % self.tensor_parallel:
            raise ValueError(
                f"n_gpus {self.n_gpus} is not a multiple of tensor_parallel {self.tensor_parallel}"
            )
        if self.gpus_per_host % self.tensor_parallel:
            raise ValueError(
                f"gpus_per_host {self.gpus_per_host} is not a multiple of tensor_parallel "
                f"{self.tensor_parallel}; a rank lies within one host"
            )

    @property
    def n_ranks(self) -> int:
        return self.n_gpus // self.tensor_parallel

    @property
    def ranks_per_host(self) -> int:
        return self.gpus_per_host // self.tensor_parallel

    @property
    def rank_bandwidth_bytes_per_second(self) -> float:
        """Bandwidth of a rank's network links together, in each direction."""
        return self.gpu_bandwidth_bytes_per_second * self.tensor_parallel

    @property
    def rank_host_bandwidth_bytes_per_second(self) -> float:
        """Bandwidth of a rank's links inside its host together, in each direction."""
        return self.host_bandwidth_bytes_per_second * self.tensor_parallel

    def host_of(self, rank: int) -> str:
        """Name of the machine that ``rank`` lies on."""
        return f"host-{rank // self.ranks_per_host}"
