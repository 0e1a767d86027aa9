"""``distca control-plane``: membership, planning and publication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca.options import options_from


@dataclass(frozen=True, kw_only=True)
class ControlPlaneOptions:
    """Where it listens, and how it plans by default."""

    listen: Annotated[str, typer.Option(help="host:port of gRPC; port 0 takes any free one.")] = (
        "0.0.0.0:7700"
    )
    metrics_listen: Annotated[
        str, typer.Option(help="host:port of /metrics for Prometheus, likewise.")
    ] = "0.0.0.0:7701"
    address_file: Annotated[
        Path | None,
        typer.Option(help="File to write the bound addresses to, as JSON, once it serves."),
    ] = None
    planner: Annotated[
        str, typer.Option(help="Planner of jobs that name none; default: the best one.")
    ] = ""
    planning_threads: Annotated[
        int, typer.Option(help="Jobs that are planned at the same time.")
    ] = 2
    lease_seconds: Annotated[
        float, typer.Option(help="Servers and ranks live so long without a heartbeat.")
    ] = 15.0
    tls_certificate: Annotated[
        Path | None,
        typer.Option(help="Certificate chain; turns TLS on.", rich_help_panel="TLS"),
    ] = None
    tls_key: Annotated[
        Path | None, typer.Option(help="Its private key.", rich_help_panel="TLS")
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Clients must show a certificate of this authority (mTLS).",
            rich_help_panel="TLS",
        ),
    ] = None

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: give both or neither")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")


@options_from
def control_plane(options: ControlPlaneOptions) -> None:
    """Run the control plane: servers and trainers register here and receive plans."""
    from control_plane.planners import DEFAULT_PLANNER
    from control_plane.server import run
    from control_plane.settings import ControlPlaneSettings, CoordinatorSettings, TlsFiles
    from distca.commands.usage import as_usage_error

    tls = None
    if options.tls_certificate is not None and options.tls_key is not None:
        tls = TlsFiles(
            certificate_file=options.tls_certificate,
            key_file=options.tls_key,
            client_ca_file=options.tls_client_ca,
        )
    with as_usage_error():
        settings = ControlPlaneSettings(
            listen_address=options.listen,
            metrics_address=options.metrics_listen,
            address_file=options.address_file,
            coordinator=CoordinatorSettings(
                lease_seconds=options.lease_seconds,
                planning_threads=options.planning_threads,
                default_planner=options.planner or DEFAULT_PLANNER,
            ),
            tls=tls,
        )
    run(settings)
