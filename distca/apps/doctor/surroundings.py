"""The surroundings of checks: machine, environment, and the user's wishes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from data_plane.transport import TransportName
from data_plane.transport_choice import TransportChoice, choose_transport, named_transport
from data_plane.transport_facts import TransportFacts, transport_facts
from distca.apps.doctor.cluster_probe import ClusterProbe
from distca.apps.doctor.settings import DoctorSettings
from distca.contract.addresses import hosts_of


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Everything that a check looks at.

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

    def __post_init__(self) -> None:
        asks = self.cluster
        towards = hosts_of("control_plane", asks.settings.address) if asks is not None else ()
        object.__setattr__(self, "settings", self.settings.located(towards))

    @cached_property
    def facts(self) -> TransportFacts:
        """This machine's offers to the transports."""
        return transport_facts(self.root, self.environ)

    @cached_property
    def pool_transports(self) -> frozenset[TransportName]:
        """The pool's transports; empty if there are none, this role may not know, or the
        settings leave the pool out."""
        asks = self.cluster if self.settings.pool else None
        answer = asks.answer_or_none() if asks else None
        return answer.transports if answer else frozenset()

    @cached_property
    def transport(self) -> TransportChoice:
        """The transport that the settings stand for."""
        settings = self.settings
        name = TransportName(settings.transport)
        if name is not TransportName.AUTO:
            return named_transport(name, self.facts, one_host=settings.one_host)
        return choose_transport(self.facts, one_host=settings.one_host, peers=self.pool_transports)
