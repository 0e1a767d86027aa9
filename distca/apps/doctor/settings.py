"""Options of an examination; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

import typer

from core_attention.shape import AttentionShape, parse_shape
from data_plane.interfaces import OWN_ADDRESS, own_address, rows_host
from data_plane.transport import TransportName, check_transport
from distca.contract.checks import check_host, check_least, check_seconds
from distca.contract.timeouts import default_seconds
from distca.options import Read


def _is_gpu(device: str) -> bool:
    kind, _, index = device.partition(":")
    return kind == "cuda" and index.isdecimal()


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """The node's purpose, and the processes that it must reach."""

    device: Annotated[str, typer.Option(help="cpu or cuda:INDEX.")] = "cpu"
    also_devices: Annotated[
        tuple[str, ...],
        typer.Option(
            "--also-device",
            metavar="cuda:INDEX",
            help="Another GPU that is to be fit, and its kernels; may be given several times.",
        ),
    ] = ()
    shapes: Annotated[
        tuple[AttentionShape, ...],
        typer.Option(
            "--shape",
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape that the kernel must run; may be given several times.",
        ),
        Read(str, parse_shape),
    ] = ()
    data_host: Annotated[
        str,
        typer.Option(
            help="Address of this machine that others reach; auto: what its name stands for, or "
            "where that is loopback the address towards the control plane.",
        ),
    ] = OWN_ADDRESS
    data_interface: Annotated[
        str,
        typer.Option(
            help="Network interface whose IPv4 address others reach, for example net1, instead of "
            "--data-host.",
        ),
    ] = ""
    transport: Annotated[str, typer.Option(help="auto, ucxx or nixl.")] = TransportName.AUTO
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
    pool: Annotated[
        bool,
        typer.Option(help="Compare with the attention nodes that the control plane names."),
    ] = True
    min_gigabytes_per_second: Annotated[
        float, typer.Option(help="A slower way is a failure; 0 asks for nothing.")
    ] = 0.0
    probe_seconds: Annotated[float, typer.Option(help="One measurement may take this long.")] = (
        default_seconds("probe_seconds")
    )
    skip: Annotated[
        frozenset[str],
        typer.Option(
            metavar="CHECK",
            help="Check to leave out, by the name that stands in its line; may be given several "
            "times.",
        ),
    ] = frozenset()

    def __post_init__(self) -> None:
        if self.device != "cpu" and not _is_gpu(self.device):
            raise ValueError(f"device is {self.device!r}; give cpu or cuda:INDEX")
        for device in self.also_devices:
            if not _is_gpu(device):
                raise ValueError(f"also_device is {device!r}; give cuda:INDEX")
        check_transport(self.transport)
        check_seconds(self)
        check_least(self, min_gigabytes_per_second=0)
        check_host(self, "data_host")
        rows_host(self.data_host, self.data_interface)

    def located(self, towards: Iterable[str]) -> DoctorSettings:
        """The same with ``data_host`` an address: where it is to be this machine's own, the one
        that processes here take whose control plane is one of the hosts ``towards``; loopback if
        they find none, which check dns reports."""
        if self.data_host != OWN_ADDRESS:
            return self
        try:
            return replace(self, data_host=own_address(towards=towards))
        except ValueError:
            return replace(self, data_host="127.0.0.1")

    @property
    def rows_host(self) -> str:
        """The address at which rows are exchanged."""
        return rows_host(self.data_host, self.data_interface)

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"
