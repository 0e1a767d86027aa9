"""Options of a session."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any

from torch import nn

from core_attention.shape import AttentionShape
from core_attention.tick import MAX_LAYERS, MAX_NANO_BATCHES
from data_plane.transports import TransportName, check_transport
from distca.contract.timeouts import check_order, known_timeouts


class Placement(StrEnum):
    """Which servers run a job's CA-tasks."""

    POOL = "pool"
    IN_PLACE = "in-place"
    MIXED = "mixed"


@dataclass(frozen=True, kw_only=True)
class SessionOptions:
    """What a rank must know to join a job.

    Attributes:
        control_plane: ``host:port`` of the control plane; if it has standbys, the addresses of all
            with commas between.
        job: name of the job; the same on every rank, and unique among the jobs that run.
        rank: this data-parallel rank.
        n_ranks: ranks of the job.
        n_layers: core-attention calls in one forward of the model.
        n_nano_batches: nano-batches of a step; 2 for ping-pong.
        shape: heads, head dims and dtype of the model's core attention.
        placement: pool servers, the ranks' own in-place servers, or both.
        tolerance: eps, by which the busiest server may exceed the mean load.
        planner: name of the planner; empty for the control plane's default.
        min_forward_tokens, min_backward_tokens: shortest piece that a document is cut into; 0 for
            the default.
        softmax_scale: multiplies q.k before the softmax; None is 1 / sqrt(head_dim).
        device: where the model's tensors are, for example ``"cpu"`` or ``"cuda:0"``.
        data_host: address of this machine that other ranks reach; used by in-place servers.
        data_port: port of the in-place server; 0 takes any free one.
        transport: ``"ucxx"`` or ``"nixl"``, the same on every rank and server; ``"auto"`` takes
            that of the pool's servers, or what suits this machine.
        one_host: all ranks and servers are on this machine, so shared memory may be used.
        start_timeout_seconds: to reach the control plane at start; the first start of one on a
            machine compiles its planner for a minute.
        held_timeout_seconds: how long opening waits for the end of an earlier job of the name whose
            processes may be gone; longer than the control plane's lease.
        connect_timeout_seconds: to reach each server.
        control_plane_timeout_seconds: how long the control plane may be away while training goes
            on.
        plan_timeout_seconds: how long a step waits for its plan, while the control plane is there.
        tick_timeout_seconds: how long a tick may take, whatever the reason.
        recovery_timeout_seconds: how long a step may be without a plan after it lost a server,
            while the control plane can be reached.
        collective_timeout_seconds: how long the ranks wait for each other in a collective of
            torch.distributed; checked only, since it is set elsewhere (600 s is NCCL's default).
        ping_quiet_seconds: how long a server that owes a reply may be silent before it is asked for
            a sign of life.
        ping_timeout_seconds: how long it may take to give one; without it, it counts as lost.
        checksums: every message between ranks and servers carries one; the same on every rank.
        check_results: look for NaN and Inf in servers' results; None: on the CPU, where it costs
            next to nothing.
        audit_rate: share of the tasks that servers run for this rank which is recomputed at home.
        audit_seed: chooses which.
        kept_forward_ticks: of how many complete forward layers (a nano-batch) the inputs are kept
            for other ranks' replays, where documents span ranks. None: of all, so that every
            failure is recovered from; they take as much memory as the activations that they are.
            Ranks that gather sharded weights layer by layer cannot drift apart: 3 is enough.
        probe_bytes: size of the bandwidth probe to each server at start; 0 leaves it out.
        min_gigabytes_per_second: a probe below this is a warning in the log, and the floor that
            the metrics tell; 0 is no floor.
        metrics_port: port of ``/metrics`` for Prometheus; 0 takes any free one, None serves none
            (``Session.metrics_registry`` is there for your own endpoint).
        metrics_host: address it listens on.
        profile_dir: where an in-place server caches its cost profile.
        ca_file, certificate_file, key_file, server_name, certificate_check_seconds: TLS to the
            control plane; see ``distca.contract.rpc``.
    """

    control_plane: str
    job: str
    rank: int
    n_ranks: int
    n_layers: int
    shape: AttentionShape
    n_nano_batches: int = 2
    placement: Placement = Placement.IN_PLACE
    tolerance: float = 0.03
    planner: str = ""
    min_forward_tokens: int = 0
    min_backward_tokens: int = 0
    softmax_scale: float | None = None
    device: str = "cpu"
    data_host: str = field(default_factory=lambda: socket.gethostbyname(socket.gethostname()))
    data_port: int = 0
    transport: str = TransportName.AUTO
    one_host: bool = False
    start_timeout_seconds: float = 180.0
    held_timeout_seconds: float = 45.0
    connect_timeout_seconds: float = 20.0
    control_plane_timeout_seconds: float = 300.0
    plan_timeout_seconds: float = 60.0
    tick_timeout_seconds: float = 120.0
    recovery_timeout_seconds: float = 60.0
    collective_timeout_seconds: float = 600.0
    ping_quiet_seconds: float = 2.0
    ping_timeout_seconds: float = 5.0
    checksums: bool = False
    check_results: bool | None = None
    audit_rate: float = 0.0
    audit_seed: int = 0
    kept_forward_ticks: int | None = None
    probe_bytes: int = 8 * 2**20
    min_gigabytes_per_second: float = 0.0
    metrics_port: int | None = None
    metrics_host: str = "0.0.0.0"
    profile_dir: Path = Path.home() / ".cache" / "distca"
    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    certificate_check_seconds: float = 10.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "placement", Placement(self.placement))
        object.__setattr__(self, "transport", check_transport(self.transport))
        self._check_range("n_ranks", 1, 2**16)
        self._check_range("rank", 0, self.n_ranks - 1)
        self._check_range("n_layers", 1, MAX_LAYERS)
        self._check_range("n_nano_batches", 1, MAX_NANO_BATCHES)
        self._check_range("data_port", 0, 2**16 - 1)
        if self.metrics_port is not None:
            self._check_range("metrics_port", 0, 2**16 - 1)
        if not (
            math.isfinite(self.min_gigabytes_per_second) and self.min_gigabytes_per_second >= 0
        ):
            raise ValueError(
                f"min_gigabytes_per_second is {self.min_gigabytes_per_second}; it must be 0 or more"
            )
        self._check_range("probe_bytes", 0, 64 * 2**20)
        if self.kept_forward_ticks is not None:
            self._check_range("kept_forward_ticks", 1, MAX_LAYERS)
        if not (math.isfinite(self.tolerance) and self.tolerance >= 0):
            raise ValueError(f"tolerance is {self.tolerance}; it must be 0 or more")
        if not 0 <= self.audit_rate <= 1:
            raise ValueError(f"audit_rate is {self.audit_rate}; it must be a share, 0 to 1")
        for option in fields(self):
            value = getattr(self, option.name)
            if option.name.endswith("_seconds") and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{option.name} is {value}; it must be a positive number")
        check_order(known_timeouts(self))

    @classmethod
    def for_model(
        cls, model: nn.Module, *, inputs: Mapping[str, Any] | None = None, **options: Any
    ) -> SessionOptions:
        """Options whose ``n_layers``, ``shape``, ``softmax_scale`` and ``device`` are found by one
        forward of a few tokens. The model is left as it was, and nothing is sent.

        Call it as the model is trained: on its device, in its dtype, inside ``torch.autocast`` if
        its steps are, and before its weights are sharded. DistributedDataParallel, PingPong,
        ``torch.compile`` and adapters may be around it.

        Args:
            model: what calls core attention.
            inputs: keyword arguments of one forward; not needed for models of transformers.
            options: of the session. Those that the probe finds are checked against it.

        Raises:
            SessionError: the model's weights are sharded or on the meta device, it does not call
                core attention, or its calls differ in shape, dtype or scale.
            ValueError: an option has an invalid value or contradicts the model, or ``inputs`` are
                needed.
        """
        # The probe stands on ping-pong, which stands on this module.
        from trainer_client.integrations.probe import probe_model

        return cls(**probe_model(model, inputs).complete(options))

    @property
    def checks_results(self) -> bool:
        """Whether servers' results are looked at for NaN and Inf."""
        return self.device == "cpu" if self.check_results is None else self.check_results

    @property
    def scale(self) -> float:
        """What multiplies q.k before the softmax."""
        return self.softmax_scale or self.shape.default_softmax_scale

    def _check_range(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be {low} to {high}")
