"""A control plane as the real one, that can be made to die at the worst moments.

``python -m tests.cluster.chaos.control_plane_process '{"listen": ..., ...}'``. With
``die_publishing`` it kills itself while it publishes a plan: one rank has it, the other members do
not. With ``planning_seconds`` every plan takes that long, so that a kill at any time hits one.
``certificates`` is a folder of ``distca certs make`` for mutual TLS, ``leader_lock`` a lock to
stand by for.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from control_plane.jobs.event_streams import EventStreams
from control_plane.planner.planners import PLANNERS
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.server import run
from control_plane.settings import ControlPlaneSettings, CoordinatorSettings
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape
from distca.contract.settings import TlsFiles
from distca.v1 import jobs_pb2
from tests.support import random_planner


def slow_planner(seconds: float) -> Any:
    """The random planner, that takes its time."""

    def plan(
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        shape: AttentionShape,
        options: PlanningOptions,
        *,
        epoch: int = 0,
    ) -> Plan:
        time.sleep(seconds)
        return random_planner.plan(manifest, servers, shape, options, epoch=epoch)

    return plan


def die_publishing(plans: int) -> None:
    """This process kills itself once it has told a rank of its ``plans``-th plan."""
    send_to_rank = EventStreams.send_to_rank
    told = 0

    def tell_and_die(self: EventStreams, job: Any, rank: int, event: bytes) -> None:
        nonlocal told
        send_to_rank(self, job, rank, event)
        if jobs_pb2.PlanEvent.FromString(event).HasField("step_planned") and rank == 0:
            told += 1
            if told == plans:
                os.kill(os.getpid(), signal.SIGKILL)

    setattr(EventStreams, "send_to_rank", tell_and_die)  # noqa: B010 - mypy takes no such assignment


def tls_files(folder: Path) -> TlsFiles:
    """Mutual TLS with the certificates of ``distca certs make``."""
    return TlsFiles(
        certificate_file=folder / "control-plane.crt",
        key_file=folder / "control-plane.key",
        client_ca_file=folder / "ca.crt",
    )


def main(chosen: dict[str, Any]) -> None:
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if chosen.get("die_publishing"):
        die_publishing(chosen["die_publishing"])
    run(
        ControlPlaneSettings(
            listen_address=chosen["listen"],
            metrics_address=None,
            address_file=Path(chosen["address_file"]),
            state_dir=Path(chosen["state_dir"]),
            leader_lock=Path(chosen["leader_lock"]) if "leader_lock" in chosen else None,
            tls=tls_files(Path(chosen["certificates"])) if "certificates" in chosen else None,
            coordinator=CoordinatorSettings(default_planner=chosen["planner"]),
        ),
        planners={**PLANNERS, "random": slow_planner(chosen.get("planning_seconds", 0.0))},
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
