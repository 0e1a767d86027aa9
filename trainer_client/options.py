"""Options of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attention_node.settings import check_device, device_name
from core_attention.ca_task import MaskKind
from core_attention.pipelining import Pipelining
from core_attention.shape import AttentionShape
from core_attention.tick import MAX_LAYERS, MAX_NANO_BATCHES
from data_plane.interfaces import OWN_ADDRESS, take_own_address
from data_plane.transport import TransportName, check_transport
from distca.contract.addresses import hosts_of
from distca.contract.checks import (
    check_bool,
    check_host,
    check_least,
    check_port,
    check_positive,
    check_range,
    check_seconds,
    take_paths,
)
from distca.contract.identity import check_name
from distca.contract.settings import (
    PROFILE_DIR,
    ClientTls,
    IntegritySettings,
    PlanRequest,
    RankTimeouts,
)
from distca.contract.settings import (
    Placement as Placement,
)
from distca.contract.tensor_parallel import group_fault
from distca.contract.timeouts import check_order, default_seconds, known_timeouts


@dataclass(frozen=True, kw_only=True)
class SessionOptions(RankTimeouts, PlanRequest, IntegritySettings, ClientTls):
    """Options with which a rank joins a job; timeouts, planning, integrity and TLS are described
    where they are declared, in :mod:`distca.contract.settings`.

    Attributes:
        control_plane: ``host:port`` of the control plane; if it has standbys, the addresses of all
            with commas between.
        job: name of the job; the same on every rank, and unique among the jobs that run.
        rank: this process, counted over data-parallel replicas, pipeline stages and tensor-parallel
            ranks.
        n_ranks: ranks of the job, over all of them.
        n_layers: core-attention calls in one forward of the model, without those of layers with a
            window or with chunks, which are computed at home; where ranks form pipelines, in all
            stages of the rank that has most.
        windows: has servers compute layers with windows too: of each of ``n_layers``, the keys that
            a query sees at most, or 0 for all. For documents that are cut between ranks, since keys
            travel as for full layers. In pipelines all are equal.
        head_groups: a call is so many ticks, each with one in so many heads: the replies of one
            travel while the next is computed. Divides ``shape.num_heads_kv``; pays where the
            network is slow and one nano-batch at a time is computed, see ``distca plan``. 1 in
            pipelines.
        n_nano_batches: nano-batches of a step; 2 for ping-pong, and of each microbatch where ranks
            form pipelines.
        cut_documents: whole packed rows are split in their middle, whatever document lies there:
            with ``attach(turns=2)``, so that one long document takes turns with itself. Manifests
            of your own may cut documents in any case.
        shape: heads, head dims and dtype of the model's core attention; under tensor parallelism
            the heads of one rank.
        pipelining: of ranks that form pipelines: their schedule, and what a stage computes beside
            core attention, so that ranks whose stage idles take more of it; the same on every rank.
        tensor_parallel_ranks: the ranks of this rank's tensor-parallel group, itself among them, in
            the order of their tensor-parallel indices. They must hold the same documents; a step in
            which they do not fails, by name.
        placement: pool servers, the ranks' own in-place servers, or both.
        softmax_scale: multiplies q.k before the softmax, above 0; None is 1 / sqrt(head_dim).
        device: where the model's tensors are, for example ``"cpu"`` or ``"cuda:0"``.
        data_host: address of this machine that other ranks reach; ``"auto"``: what its name stands
            for, or where that is loopback the address towards the control plane.
        data_port: port of the in-place server; 0 takes any free one.
        transport: ``"ucxx"``, ``"nixl"`` or ``"nixl:libfabric"``, the same on every rank and
            server; ``"auto"`` takes that of the pool's servers, or what suits this machine.
        one_host: all ranks and servers are on this machine, so shared memory may be used.
        replace: opening ends a live job of the name in which the rank has no place.
        collective_timeout_seconds: how long the ranks wait for each other in a collective of
            torch.distributed; checked only, since it is set elsewhere (600 s is NCCL's default).
        ping_quiet_seconds: how long a server that owes a reply may be silent before it is asked for
            a sign of life.
        ping_timeout_seconds: how long it may take to give one; without it, it counts as lost.
        kept_forward_ticks: of how many complete forward layers (a nano-batch) the inputs are kept
            for other ranks' replays, where documents span ranks. None: of all, so that every
            failure is recovered from; they take as much memory as the activations that they are.
            Ranks that gather sharded weights layer by layer cannot drift apart: 3 is enough.
        probe_bytes: size of the bandwidth probe to each server at start; 0 leaves it out.
        min_gigabytes_per_second: a probe below this is a warning in the log, and the floor that the
            metrics show; 0 is no floor.
        metrics_port: port of ``/metrics`` for Prometheus; 0 takes any free one, None serves none
            (``Session.metrics_registry`` is there for your own endpoint). For ``attach``, and in
            ``DISTCA_METRICS_PORT``, that of the first rank on a host.
        metrics_host: address it listens on.
        profile_dir: where an in-place server caches its cost profile.
    """

    control_plane: str
    job: str
    rank: int
    n_ranks: int
    n_layers: int
    shape: AttentionShape
    n_nano_batches: int = 2
    head_groups: int = 1
    windows: Sequence[int] = ()
    cut_documents: bool = False
    pipelining: Pipelining | None = None
    tensor_parallel_ranks: Sequence[int] = ()
    placement: Placement = Placement.IN_PLACE
    softmax_scale: float | None = None
    device: str = "cpu"
    data_host: str = OWN_ADDRESS
    data_port: int = 0
    transport: str = TransportName.AUTO
    one_host: bool = False
    replace: bool = False
    collective_timeout_seconds: float = default_seconds("collective_timeout_seconds")
    ping_quiet_seconds: float = default_seconds("ping_quiet_seconds")
    ping_timeout_seconds: float = default_seconds("ping_timeout_seconds")
    kept_forward_ticks: int | None = None
    probe_bytes: int = 8 * 2**20
    min_gigabytes_per_second: float = 0.0
    metrics_port: int | None = None
    metrics_host: str = "0.0.0.0"
    profile_dir: Path = PROFILE_DIR

    @property
    def own_layers(self) -> int:
        """Core-attention calls in one forward on this rank."""
        return self.n_layers if self.pipelining is None else self.pipelining.layers_of(self.rank)

    @property
    def layer_ticks(self) -> int:
        """Ticks of one forward in a lane, which everybody else counts as layers."""
        return self.n_layers * self.head_groups

    @property
    def tick_shape(self) -> AttentionShape:
        """Heads, head dims and dtype of a tick."""
        return self.shape.share(self.head_groups)

    def __post_init__(self) -> None:
        for kind in (PlanRequest, IntegritySettings, ClientTls):
            kind.__post_init__(self)
        object.__setattr__(self, "placement", Placement(self.placement))
        object.__setattr__(self, "transport", check_transport(self.transport))
        # Also a torch.device, which equals no text.
        object.__setattr__(self, "device", device_name(self.device))
        check_device("device", self.device)
        take_paths(self, "profile_dir")
        check_name("job", self.job)
        check_bool(self, "cut_documents", "one_host")
        check_host(self, "data_host")
        control_planes = hosts_of("control_plane", self.control_plane)
        take_own_address(self, towards=control_planes)
        self._check_range("n_ranks", 1, 2**16)
        self._check_range("rank", 0, self.n_ranks - 1)
        self._check_range("head_groups", 1, self.shape.num_heads_kv)
        if self.shape.num_heads_kv % self.head_groups:
            raise ValueError(
                f"head_groups is {self.head_groups}; it must divide num_heads_kv, "
                f"{self.shape.num_heads_kv}"
            )
        self._check_range("n_layers", 1, MAX_LAYERS // self.head_groups)
        self._check_range("n_nano_batches", 1, MAX_NANO_BATCHES)
        if self.pipelining is not None:
            if self.head_groups > 1:
                raise ValueError(
                    f"head_groups is {self.head_groups}; in pipelines, whose nano-batches may take "
                    "turns, it is 1"
                )
            self.pipelining.check_job(self.n_ranks, self.n_layers, self.n_nano_batches)
        self._check_windows()
        self._check_cut_documents()
        self._check_tensor_parallel_ranks()
        check_port(self, "data_port", "metrics_port")
        check_least(self, min_gigabytes_per_second=0)
        check_positive(self, "softmax_scale")
        self._check_range("probe_bytes", 0, 64 * 2**20)
        if self.kept_forward_ticks is not None:
            self._check_range("kept_forward_ticks", 1, MAX_LAYERS)
        check_seconds(self)
        check_order(known_timeouts(self))

    def _check_windows(self) -> None:
        object.__setattr__(self, "windows", tuple(self.windows) if any(self.windows) else ())
        fits = len(self.windows) == self.n_layers and min(self.windows) >= 0
        may_be = self.shape.mask is MaskKind.CAUSAL and (
            self.pipelining is None or len(set(self.windows)) == 1
        )
        if self.windows and not (fits and may_be):
            raise ValueError(
                f"windows is {self.windows}; give 0 or more for each of {self.n_layers} layers, "
                "under the causal mask, in pipelines all equal, or none"
            )

    def _check_cut_documents(self) -> None:
        refusals = (
            (self.n_nano_batches % 2 == 1, f"of {self.n_nano_batches} nano-batches two are cut"),
            (
                self.pipelining is not None,
                "the rows of a pipeline's microbatches lie as they are submitted: give a document "
                "that is cut segments in both nano-batches of its microbatch",
            ),
            (
                self.shape.mask is not MaskKind.CAUSAL,
                f"under the mask {self.shape.mask.name} queries need keys of both nano-batches",
            ),
        )
        for holds, why in refusals:
            if self.cut_documents and holds:
                raise ValueError(f"cut_documents is True, and {why}; leave it out")

    @property
    def checks_results(self) -> bool:
        """True if servers' results are looked at for NaN and Inf."""
        return self.device == "cpu" if self.check_results is None else self.check_results

    @property
    def rank_ping_seconds(self) -> float:
        """How long another rank's process may take to give a sign of life before its server counts
        as lost. On GPUs one call of CUDA may hold up all of its threads."""
        if not self.device.startswith("cuda"):
            return self.ping_timeout_seconds
        return min(default_seconds("blocked_seconds"), self.tick_timeout_seconds)

    @property
    def scale(self) -> float:
        """The factor of q.k before the softmax."""
        return (
            self.shape.default_softmax_scale if self.softmax_scale is None else self.softmax_scale
        )

    def _check_tensor_parallel_ranks(self) -> None:
        group = tuple(self.tensor_parallel_ranks)
        object.__setattr__(self, "tensor_parallel_ranks", group)
        if fault := group_fault(self.rank, group, self.n_ranks):
            raise ValueError(
                f"tensor_parallel_ranks is {list(group)} and rank {self.rank}; {fault}"
            )

    def _check_range(self, name: str, low: int, high: int) -> None:
        check_range(name, getattr(self, name), low, high)
