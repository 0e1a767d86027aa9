"""``distca attention-node``: a server of the pool."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distca.client_tls import ClientTls
from distca.options import options_from


@dataclass(frozen=True, kw_only=True)
class NodeOptions:
    """Where the node listens, which device it uses and which models it serves."""

    control_plane: Annotated[
        str,
        typer.Option(help="host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE"),
    ]
    shape: Annotated[
        list[str],
        typer.Option(
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape to measure at start, for example 32:8:128:bfloat16; may be "
            "given several times. Jobs of other shapes are served too, planned by scaling.",
        ),
    ]
    server_id: Annotated[
        str, typer.Option(help="Unique name; default: host name and process id.")
    ] = ""
    device: Annotated[str, typer.Option(help="cpu or cuda:INDEX.")] = "cpu"
    data_host: Annotated[
        str, typer.Option(help="Address of this machine that trainers reach; default: its own.")
    ] = ""
    data_port: Annotated[int, typer.Option(help="Of the data plane; 0: any free one.")] = 0
    health_port: Annotated[int, typer.Option(help="Of grpc.health.v1, likewise.")] = 0
    metrics_port: Annotated[int, typer.Option(help="Of /metrics, likewise.")] = 0
    transport: Annotated[
        str,
        typer.Option(
            help="auto (what suits this machine's devices), ucxx or nixl; the same for all "
            "processes of a job."
        ),
    ] = "auto"
    one_host: Annotated[
        bool,
        typer.Option(
            "--one-host/--several-hosts",
            help="Whether all trainers are on this machine: then shared memory is used.",
        ),
    ] = False
    capacity_rows: Annotated[
        int, typer.Option(help="Rows of Q plus K/V that it takes in one tick; 0: no limit.")
    ] = 0
    buffer_limit_mib: Annotated[
        int, typer.Option(help="Memory for messages, in MiB; 0: no limit.")
    ] = 0
    profile_dir: Annotated[
        Path | None,
        typer.Option(help="Where measured cost profiles are kept; default: ~/.cache/distca."),
    ] = None
    connect_seconds: Annotated[
        float, typer.Option(help="How long to look for the control plane at start.")
    ] = 180.0
    control_plane_timeout_seconds: Annotated[
        float, typer.Option(help="How long to serve planned steps while the control plane is away.")
    ] = 300.0
    stuck_seconds: Annotated[
        float,
        typer.Option(help="Exit with an error after so long with work and none of it finished."),
    ] = 60.0
    drain_seconds: Annotated[
        float, typer.Option(help="How long planned steps may take to finish on SIGTERM.")
    ] = 30.0
    address_file: Annotated[
        Path | None,
        typer.Option(help="File to write the bound addresses to, as JSON, once it serves."),
    ] = None


@options_from
def attention_node(options: NodeOptions, tls: ClientTls) -> None:
    """Run an attention node: it joins the pool and serves core attention."""
    from attention_node.server import NodeSettings, run
    from distca.commands.usage import as_usage_error
    from distca.shapes import parse_shape

    with as_usage_error():
        settings = NodeSettings(
            control_plane=options.control_plane,
            server_id=options.server_id or f"{socket.gethostname()}-{os.getpid()}",
            profile_shapes=tuple(parse_shape(text) for text in options.shape),
            device=options.device,
            data_host=options.data_host or socket.gethostbyname(socket.gethostname()),
            data_port=options.data_port,
            health_port=options.health_port,
            metrics_port=options.metrics_port,
            transport=options.transport,
            one_host=options.one_host,
            capacity_rows=options.capacity_rows,
            buffer_limit_bytes=options.buffer_limit_mib * 2**20,
            profile_dir=options.profile_dir or Path.home() / ".cache" / "distca",
            connect_seconds=options.connect_seconds,
            control_plane_timeout_seconds=options.control_plane_timeout_seconds,
            stuck_seconds=options.stuck_seconds,
            drain_seconds=options.drain_seconds,
            address_file=options.address_file,
            ca_file=tls.tls_ca,
            certificate_file=tls.tls_certificate,
            key_file=tls.tls_key,
            server_name=tls.tls_server_name,
            certificate_check_seconds=tls.tls_check_seconds,
        )
    run(settings)
