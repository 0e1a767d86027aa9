"""``distca control-plane``: membership, planning and publication."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca.options import options_from

_SECURITY = "Security"
_AVAILABILITY = "Availability"


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
    state_dir: Annotated[
        Path | None,
        typer.Option(
            help="Folder for what must outlive the process: a token secret and the number of its "
            "starts; without it, starts are told apart by the time.",
            envvar="DISTCA_STATE_DIR",
        ),
    ] = None
    stall_seconds: Annotated[
        float,
        typer.Option(
            help="A server that has work and finishes none for so long is fenced; more than its "
            "longest kernel call takes.",
            rich_help_panel=_AVAILABILITY,
        ),
    ] = 10.0
    leader_lock: Annotated[
        Path | None,
        typer.Option(
            help="Of several control planes the one leads that holds the lock of this file; the "
            "others stand by. They must share state folder or token secret.",
            rich_help_panel=_AVAILABILITY,
        ),
    ] = None
    leader_lease: Annotated[
        str,
        typer.Option(
            help="The same with a Kubernetes Lease: NAMESPACE/NAME.",
            envvar="DISTCA_LEADER_LEASE",
            rich_help_panel=_AVAILABILITY,
        ),
    ] = ""
    leader_pod: Annotated[
        str,
        typer.Option(
            help="Name of this process's pod, in the Lease's namespace: it has the label "
            "distca.io/leader=true while it leads, for a Service to select.",
            envvar="DISTCA_LEADER_POD",
            rich_help_panel=_AVAILABILITY,
        ),
    ] = ""
    token_secret: Annotated[
        Path | None,
        typer.Option(
            help="File of 32 random bytes or more that jobs' tokens are derived from: with it they "
            "stay good when the control plane starts again; default: one that is kept in the state "
            "folder, or without that a new one each time.",
            envvar="DISTCA_TOKEN_SECRET",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    registrations_per_second: Annotated[
        float,
        typer.Option(
            help="Servers and ranks that one identity may register in the long run.",
            rich_help_panel=_SECURITY,
        ),
    ] = 200.0
    registration_burst: Annotated[
        int, typer.Option(help="How many of them at once.", rich_help_panel=_SECURITY)
    ] = 4096
    max_jobs_per_identity: Annotated[
        int,
        typer.Option(
            help="Jobs that one identity may have open; without certificates, all together.",
            rich_help_panel=_SECURITY,
        ),
    ] = 256
    max_ranks_per_identity: Annotated[
        int,
        typer.Option(
            help="Ranks that all jobs of one identity together may have.",
            rich_help_panel=_SECURITY,
        ),
    ] = 2**16
    max_calls_per_identity: Annotated[
        int,
        typer.Option(
            help="Calls and streams that one identity may have under way; without certificates, "
            "one host.",
            rich_help_panel=_SECURITY,
        ),
    ] = 16384
    max_manifest_bytes_per_identity: Annotated[
        int,
        typer.Option(
            help="Bytes of manifests that are kept for the jobs of one identity.",
            rich_help_panel=_SECURITY,
        ),
    ] = 512 * 2**20
    data_network: Annotated[
        str,
        typer.Option(
            help="IPv4 network, for example 10.99.0.0/16, of which `distca wireguard` is given an "
            "address and the keys of other members; needs client certificates. Default: none.",
            envvar="DISTCA_DATA_NETWORK",
            rich_help_panel=_SECURITY,
        ),
    ] = ""
    max_network_members_per_identity: Annotated[
        int,
        typer.Option(
            help="Members of the data network that one identity may have.",
            rich_help_panel=_SECURITY,
        ),
    ] = 4096
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            help="Certificate chain; turns TLS on.",
            envvar="DISTCA_TLS_CERTIFICATE",
            rich_help_panel=_SECURITY,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(help="Its private key.", envvar="DISTCA_TLS_KEY", rich_help_panel=_SECURITY),
    ] = None
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Clients must show a certificate of this authority (mTLS).",
            envvar="DISTCA_TLS_CLIENT_CA",
            rich_help_panel=_SECURITY,
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
    from control_plane.planner.planners import DEFAULT_PLANNER
    from control_plane.server import run
    from control_plane.settings import (
        AccessSettings,
        ControlPlaneSettings,
        CoordinatorSettings,
        DataNetworkSettings,
        parse_network,
    )
    from distca.commands.usage import as_usage_error
    from distca.contract.tls import TlsFiles

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
            state_dir=options.state_dir,
            coordinator=CoordinatorSettings(
                lease_seconds=options.lease_seconds,
                planning_threads=options.planning_threads,
                default_planner=options.planner or DEFAULT_PLANNER,
                stall_seconds=options.stall_seconds,
                max_jobs_per_identity=options.max_jobs_per_identity,
                max_ranks_per_identity=options.max_ranks_per_identity,
                max_manifest_bytes_per_identity=options.max_manifest_bytes_per_identity,
            ),
            leader_lock=options.leader_lock,
            leader_lease=options.leader_lease,
            leader_pod=options.leader_pod,
            tls=tls,
            access=AccessSettings(
                registrations_per_second=options.registrations_per_second,
                registration_burst=options.registration_burst,
                max_calls_per_identity=options.max_calls_per_identity,
                token_secret_file=options.token_secret,
            ),
            data_network=DataNetworkSettings(
                network=parse_network(options.data_network),
                max_members_per_identity=options.max_network_members_per_identity,
            ),
        )
    run(settings)
