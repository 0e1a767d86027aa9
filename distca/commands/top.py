"""``distca top``: what a cluster does now."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from distca.client_tls import ClientTls
from distca.options import options_from


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """Whom to ask, and how often."""

    control_plane: Annotated[
        str,
        typer.Option(help="host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE"),
    ] = "localhost:7700"
    interval_seconds: Annotated[float, typer.Option(help="Between two looks.")] = 2.0
    once: Annotated[bool, typer.Option("--once", help="Show it once and end.")] = False
    json: Annotated[
        bool, typer.Option("--json", help="JSON, one document on a line for each look.")
    ] = False
    expect_servers: Annotated[
        int, typer.Option(help="With --once: fail unless so many servers take work.")
    ] = 0
    wait_seconds: Annotated[
        float,
        typer.Option(help="With --once: how long the control plane and these servers may take."),
    ] = 0.0
    timeout_seconds: Annotated[
        float, typer.Option(help="The control plane must answer within this time.")
    ] = 5.0


@options_from
def top(options: TopOptions, tls: ClientTls) -> None:
    """Watch servers and jobs in the terminal: load, balance, GB/s. Needs a certificate with the
    role operator or read-only where the control plane asks for one.
    """
    from contextlib import suppress

    from rich.console import Console

    from distca.commands.usage import as_usage_error
    from distca.contract import rpc
    from distca.top.run import Watch, watch

    console = Console()
    with as_usage_error():
        settings = rpc.RpcSettings(
            address=options.control_plane,
            connect_seconds=options.timeout_seconds,
            call_seconds=options.timeout_seconds,
            ca_file=tls.tls_ca,
            certificate_file=tls.tls_certificate,
            key_file=tls.tls_key,
            server_name=tls.tls_server_name,
        )
        what = Watch(
            interval_seconds=options.interval_seconds,
            once=options.once,
            as_json=options.json,
            expect_servers=options.expect_servers,
            wait_seconds=options.wait_seconds,
        )
    with suppress(KeyboardInterrupt):
        watch(settings, what, console)
