"""``distca doctor``: checks a node before it serves or trains."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import typer

from distca.client_tls import ClientTls
from distca.options import options_from

if TYPE_CHECKING:
    from rich.console import Console

    from data_plane.transport import Address
    from distca.doctor.surroundings import Surroundings

FAILED_EXIT_CODE = 1

CHECK_NAMES = (
    "gpu",
    "driver",
    "kernels",
    "memlock",
    "shared-memory",
    "namespaces",
    "rdma",
    "gpudirect",
    "dns",
    "certificates",
    "control-plane",
    "clock",
    "versions",
    "transport",
    "ucx",
    "peers",
)
"""Here and not from the checks themselves, which load PyTorch; a test compares them."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """What the node is for, and whom it must reach."""

    control_plane: Annotated[
        str,
        typer.Option(
            help="host:port of the control plane; default: what needs one is left out.",
            envvar="DISTCA_CONTROL_PLANE",
        ),
    ] = ""
    connect_seconds: Annotated[
        float, typer.Option(help="How long to look for the control plane.")
    ] = 10.0
    device: Annotated[str, typer.Option(help="cpu or cuda:INDEX.")] = "cpu"
    shape: Annotated[
        list[str],
        typer.Option(
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape that the kernel must run; may be given several times.",
        ),
    ] = field(default_factory=list)
    data_host: Annotated[
        str, typer.Option(help="Address of this machine that others reach; default: its own.")
    ] = ""
    transport: Annotated[str, typer.Option(help="auto, ucxx or nixl.")] = "auto"
    one_host: Annotated[
        bool,
        typer.Option(
            "--one-host/--several-hosts",
            help="Whether trainers and servers share this machine, and its shared memory.",
        ),
    ] = False
    rdma: Annotated[
        bool, typer.Option("--rdma/--tcp", help="The network that data is to travel over.")
    ] = False
    peer: Annotated[
        list[str],
        typer.Option(
            metavar="HOST:PORT",
            help="Measure the way there, where 'distca doctor --listen' or an attention node runs; "
            "all addresses of the name; may be given several times.",
        ),
    ] = field(default_factory=list)
    pool: Annotated[
        bool,
        typer.Option(
            "--pool/--no-pool",
            help="Compare with the attention nodes that the control plane names, and measure the "
            "way to each.",
        ),
    ] = True
    outsider: Annotated[
        bool,
        typer.Option(
            "--outsider",
            help="Only try whether data ports answer here, on a machine that is to be no part of "
            "any job: those of --peer, of the members that the control plane names, and "
            "--ucx-ports.",
        ),
    ] = False
    ucx_ports: Annotated[
        str,
        typer.Option(
            metavar="FIRST-LAST",
            help="With --outsider: the members' UCX_TCP_PORT_RANGE.",
            envvar="UCX_TCP_PORT_RANGE",
        ),
    ] = ""
    min_gigabytes_per_second: Annotated[
        float, typer.Option(help="A slower way is a failure; 0 asks for nothing.")
    ] = 0.0
    probe_seconds: Annotated[float, typer.Option(help="One measurement may take this long.")] = 20.0
    skip: Annotated[
        list[str],
        typer.Option(
            metavar="CHECK",
            help=f"Check to leave out, of {', '.join(CHECK_NAMES)}; may be given several times.",
        ),
    ] = field(default_factory=list)
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with 1 for what is only to look at, too.")
    ] = False
    json: Annotated[bool, typer.Option("--json", help="One JSON document, for scripts.")] = False
    listen: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Instead of checking, answer the measurements of other doctors, until Ctrl-C.",
        ),
    ] = ""


@options_from
def doctor(options: DoctorOptions, tls: ClientTls) -> None:
    """Check this machine: GPU, kernels, limits, network, certificates, the way to others.

    Every line says pass, warn or fail, and what to do. Exit code 0: fit, perhaps with warnings; 1:
    something failed.
    """
    from rich.console import Console

    from distca.commands.usage import as_usage_error

    _require_torch()
    from distca.doctor.examination import CHECKS, OUTSIDER_CHECKS, examine
    from distca.doctor.finding import Status, worst
    from distca.doctor.report import as_json, show, summary

    # UCX logs to stdout by default, which would end up among the findings.
    os.environ.setdefault("UCX_LOG_FILE", "/dev/stderr")
    console = Console(highlight=False)
    if options.listen:
        _listen(options, console)
        return
    with as_usage_error():
        around = _surroundings(options, tls)
        checks = OUTSIDER_CHECKS if options.outsider else CHECKS
        unknown = around.settings.skip - checks.keys()
        if unknown:
            raise ValueError(
                f"skip is {', '.join(sorted(unknown))}; the checks are {', '.join(checks)}"
            )
    findings = []
    for finding in examine(around, checks):
        findings.append(finding)
        if not options.json:
            show(finding, console)
    console.print(
        as_json(findings) if options.json else summary(findings),
        soft_wrap=True,
        markup=False,
        highlight=False,
    )
    status = worst(findings)
    if status is Status.FAIL or (options.strict and status is Status.WARN):
        raise typer.Exit(FAILED_EXIT_CODE)


def _require_torch() -> None:
    """Raises MissingPackageError if PyTorch is not installed, as in the control plane's image."""
    from importlib.util import find_spec

    from distca.errors import MissingPackageError

    if find_spec("torch") is None:
        raise MissingPackageError(
            "distca doctor looks at what attention nodes and trainers use, and PyTorch is not "
            "installed here; run it there, or install distca[node]"
        )


def _surroundings(options: DoctorOptions, tls: ClientTls) -> Surroundings:
    from distca.contract.rpc import RpcSettings
    from distca.doctor.cluster_probe import ClusterProbe
    from distca.doctor.surroundings import DoctorSettings, Surroundings
    from distca.shapes import parse_shape

    cluster = None
    if options.control_plane:
        settings = RpcSettings(
            address=options.control_plane,
            ca_file=tls.tls_ca,
            certificate_file=tls.tls_certificate,
            key_file=tls.tls_key,
            server_name=tls.tls_server_name,
        )
        cluster = ClusterProbe(settings, options.connect_seconds)
    return Surroundings(
        settings=DoctorSettings(
            device=options.device,
            shapes=tuple(parse_shape(text) for text in options.shape),
            data_host=options.data_host or _own_address(),
            transport=options.transport,
            one_host=options.one_host,
            rdma=options.rdma,
            peers=tuple(_address("peer", text) for text in options.peer),
            pool=options.pool,
            min_gigabytes_per_second=options.min_gigabytes_per_second,
            probe_seconds=options.probe_seconds,
            ucx_ports=_port_range(options.ucx_ports),
            skip=frozenset(options.skip),
        ),
        cluster=cluster,
    )


def _listen(options: DoctorOptions, console: Console) -> None:
    from distca.commands.usage import as_usage_error
    from distca.doctor.responder import ResponderSettings, respond_until_signal

    with as_usage_error():
        address = _address("listen", options.listen)
        settings = ResponderSettings(
            host=address.host,
            port=address.port,
            device=options.device,
            transport=options.transport,
            one_host=options.one_host,
        )
    for bound in respond_until_signal(settings):
        console.print(f"Answering doctors at {bound}; Ctrl-C ends it.", soft_wrap=True)


def _address(name: str, text: str) -> Address:
    from data_plane.transport import Address

    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"{name} is {text!r}; it must be HOST:PORT")
    return Address(host.strip("[]"), int(port))


def _port_range(text: str) -> range:
    if text in ("", "0"):
        return range(0)
    first, _, last = text.partition("-")
    bounds = [int(each) for each in (first, last or first) if each.isdecimal()]
    if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1] < 2**16:
        raise ValueError(f"ucx_ports is {text!r}; it must be FIRST-LAST, for example 7800-7899")
    return range(bounds[0], bounds[1] + 1)


def _own_address() -> str:
    """What this machine's name stands for; loopback if that does not resolve, which check dns
    tells."""
    import socket

    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"
