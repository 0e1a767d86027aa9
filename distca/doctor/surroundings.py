"""What the checks look at: the machine, the environment, and what the user asked for."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from core_attention.shape import AttentionShape
from data_plane.transport import Address
from data_plane.transport_choice import TransportChoice, choose_transport, named_transport
from data_plane.transport_facts import TransportFacts, transport_facts
from data_plane.transports import TransportName, check_transport
from distca.doctor.cluster_probe import ClusterProbe


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What the node is for.

    Attributes:
        device: ``"cpu"`` or ``"cuda:<index>"``.
        shapes: attention shapes that the kernel must run.
        data_host: address of this machine that others reach.
        transport: ``"ucxx"`` or ``"nixl"``, as trainers and servers use it, or ``"auto"``.
        one_host: trainers and servers share this machine, so shared memory is to be used.
        rdma: the network is to be RDMA; without it, TCP will do.
        peers: responders or servers to measure the way to.
        pool: whether to compare with the servers of the pool, and measure the way to each of them.
        min_gigabytes_per_second: a slower way is a failure; 0 asks for nothing.
        probe_seconds: how long one measurement may take.
        ucx_ports: ports that UCX opens besides the listeners, as UCX_TCP_PORT_RANGE limits them.
        skip: names of checks to leave out.
    """

    device: str = "cpu"
    shapes: tuple[AttentionShape, ...] = ()
    data_host: str = "127.0.0.1"
    transport: str = TransportName.AUTO
    one_host: bool = False
    rdma: bool = False
    peers: tuple[Address, ...] = ()
    pool: bool = True
    min_gigabytes_per_second: float = 0.0
    probe_seconds: float = 20.0
    ucx_ports: range = range(0)
    skip: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        kind, _, index = self.device.partition(":")
        if self.device != "cpu" and (kind != "cuda" or not index.isdecimal()):
            raise ValueError(f"device is {self.device!r}; give cpu or cuda:INDEX")
        check_transport(self.transport)
        if not (math.isfinite(self.probe_seconds) and self.probe_seconds > 0):
            raise ValueError(f"probe_seconds is {self.probe_seconds}; it must be a positive number")
        if not self.min_gigabytes_per_second >= 0:
            raise ValueError(
                f"min_gigabytes_per_second is {self.min_gigabytes_per_second}; it must be 0 or more"
            )

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Where a check looks.

    Attributes:
        settings: what the node is for.
        cluster: asks the control plane; None leaves it out.
        environ: the environment.
        root: of the file system; only tests have another than ``/``.
    """

    settings: DoctorSettings
    cluster: ClusterProbe | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")

    @cached_property
    def facts(self) -> TransportFacts:
        """What this machine offers to the transports."""
        return transport_facts(self.root, self.environ)

    @cached_property
    def pool_transports(self) -> frozenset[TransportName]:
        """What the pool's servers use; empty if there are none, this role may not know, or the
        settings leave the pool out."""
        asks = self.cluster if self.settings.pool else None
        answer = asks.answer_or_none() if asks else None
        return answer.transports if answer else frozenset()

    @cached_property
    def transport(self) -> TransportChoice:
        """The transport that the settings stand for.

        Raises:
            ImportError: ``auto``, and no library fits that is installed.
        """
        settings = self.settings
        name = TransportName(settings.transport)
        if name is not TransportName.AUTO:
            return named_transport(name, self.facts, one_host=settings.one_host)
        return choose_transport(self.facts, one_host=settings.one_host, peers=self.pool_transports)
