"""``distca health``: asks a control plane whether it leads, for people and scripts."""

from __future__ import annotations

from dataclasses import dataclass

import typer

from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import default_seconds
from distca.options import option, options_from

NOT_SERVING_EXIT_CODE = 3


@dataclass(frozen=True, kw_only=True)
class HealthOptions:
    """Whom to ask."""

    address: str = option(
        "localhost:7700",
        "host:port of gRPC of a control plane.",
        envvar="DISTCA_HEALTH_ADDRESS",
    )
    timeout_seconds: float = option(
        default_seconds("ask_seconds"), "An answer must come within this time."
    )


@options_from
def health(options: HealthOptions, tls: ClientTls) -> None:
    """Ask a control plane whether it leads (grpc.health.v1); exit code 0: yes, 3: no, 1: mute."""
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from distca.apps.commands.usage import as_usage_error
    from distca.contract import rpc

    with as_usage_error():
        settings = rpc.RpcSettings(
            address=options.address,
            connect_seconds=options.timeout_seconds,
            call_seconds=options.timeout_seconds,
            **values_of(ClientTls, tls),
        )
    with rpc.open_channel(settings) as channel:
        rpc.wait_until_ready(channel, settings)
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    status = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    typer.echo(f"{options.address}: {status}")
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        raise typer.Exit(NOT_SERVING_EXIT_CODE)
