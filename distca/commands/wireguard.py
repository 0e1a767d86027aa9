"""``distca wireguard``: this machine's place in the encrypted data network."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca.client_tls import ClientTls
from distca.options import options_from


@dataclass(frozen=True, kw_only=True)
class WireguardOptions:
    """Where this machine is reached, and what the interface is called."""

    control_plane: Annotated[
        str,
        typer.Option(
            help="host:port of the control plane, which has a --data-network.",
            envvar="DISTCA_CONTROL_PLANE",
        ),
    ]
    host: Annotated[
        str,
        typer.Option(
            help="Address of this machine that other members send UDP to; default: its own."
        ),
    ] = ""
    port: Annotated[int, typer.Option(help="UDP port that members listen on.")] = 51820
    interface: Annotated[str, typer.Option(help="Name of the interface that is made.")] = "distca0"
    mtu: Annotated[
        int, typer.Option(help="Of the interface: 80 less than that of the network below.")
    ] = 1420
    replace: Annotated[
        bool,
        typer.Option(
            "--replace/--no-replace",
            help="Remove an interface of that name first, which a killed process has left.",
        ),
    ] = False
    state_file: Annotated[
        Path | None,
        typer.Option(
            help="File that keeps private key and address, so that both stay when this process "
            "starts again; default: in memory alone."
        ),
    ] = None
    connect_seconds: Annotated[
        float, typer.Option(help="How long to look for the control plane at start.")
    ] = 180.0
    address_file: Annotated[
        Path | None,
        typer.Option(help="File to write address and interface to, as JSON, once rows can go."),
    ] = None


@options_from
def wireguard(options: WireguardOptions, tls: ClientTls) -> None:
    """Join the encrypted data network: makes a WireGuard interface, prints the address to give as
    --data-host to nodes and trainers of this machine, and keeps the keys of the other members up to
    date until SIGTERM. Needs root, or CAP_NET_ADMIN, and a certificate of a server or trainer."""
    from distca.commands.usage import as_usage_error
    from distca.contract import rpc
    from distca.wireguard.member import MemberSettings, run

    with as_usage_error():
        settings = MemberSettings(
            control_plane=rpc.RpcSettings(
                address=options.control_plane,
                connect_seconds=options.connect_seconds,
                ca_file=tls.tls_ca,
                certificate_file=tls.tls_certificate,
                key_file=tls.tls_key,
                server_name=tls.tls_server_name,
                certificate_check_seconds=tls.tls_check_seconds,
            ),
            host=options.host or socket.gethostbyname(socket.gethostname()),
            port=options.port,
            interface=options.interface,
            mtu=options.mtu,
            replace=options.replace,
            state_file=options.state_file,
            address_file=options.address_file,
        )
    run(settings, typer.echo)
