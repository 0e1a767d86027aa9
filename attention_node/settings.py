"""The settings of an attention node; validated on creation.

Fields with a help text are command-line options of ``distca attention-node``, which is built from
this class; importing this module is cheap.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from attention_node.capacity import rows_within
from core_attention.shape import AttentionShape, parse_shape
from data_plane.interfaces import OWN_ADDRESS, rows_host, take_own_address
from data_plane.transport import TransportName, check_transport
from distca.contract.addresses import hosts_of
from distca.contract.checks import check_host, check_least, check_port, check_seconds
from distca.contract.identity import check_name
from distca.contract.settings import PROFILE_DIR, ClientTls
from distca.contract.timeouts import check_order, default_seconds, known_timeouts
from distca.options import Read, option

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]?))?")


def device_name(device: object) -> str:
    """The text of a device; ``"cpu"`` also where the CPU has a number, as accelerate's has."""
    return "cpu" if str(device) == "cpu:0" else str(device)


def check_device(name: str, device: str) -> None:
    """
    Raises:
        ValueError: the field ``name`` is no device that core attention may run on.
    """
    if not _DEVICE.fullmatch(device):
        raise ValueError(f"{name} is {device!r}; give cpu or cuda:INDEX")


def _bytes_of_limit(mebibytes: int) -> int:
    if mebibytes < 0:
        raise ValueError(
            f"--buffer-limit-mib is {mebibytes}; it must be 0 or more, and 0 is no limit"
        )
    return mebibytes * 2**20


@dataclass(frozen=True, kw_only=True)
class NodeSettings(ClientTls):
    """The settings of an attention node.

    Attributes:
        profile_shapes: the planner needs one that fits the job, or one to scale from.
        reply_timeout_seconds: how long a trainer may take to accept a reply.
    """

    control_plane: Annotated[
        str, typer.Option(help="host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE")
    ]
    profile_shapes: Annotated[
        tuple[AttentionShape, ...],
        typer.Option(
            "--shape",
            metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
            help="Attention shape to measure at start, for example 32:8:128:bfloat16; may be "
            "given several times. Jobs of other shapes are served too, planned by scaling.",
        ),
        Read(str, parse_shape),
    ]
    server_id: Annotated[
        str, typer.Option(help="Unique name; default: host name and process id.")
    ] = field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")
    device: str = option("cpu", "cpu or cuda:INDEX.")
    data_host: str = option(
        OWN_ADDRESS,
        "Address of this machine that trainers reach; auto: what its name stands for, or where "
        "that is loopback the address towards the control plane.",
    )
    data_interface: str = option(
        "",
        "Network interface whose IPv4 address trainers reach, for example net1; metrics stay at "
        "--data-host. Default: rows are exchanged there, too.",
    )
    data_port: int = option(0, "Port of the data plane; 0: any free one.")
    metrics_port: int = option(0, "Port of /metrics; 0: any free one.")
    transport: str = option(
        TransportName.AUTO,
        "auto (what suits this machine's devices), ucxx, nixl or nixl:libfabric; the same for all "
        "processes of a job.",
    )
    one_host: bool = option(
        False,
        "Whether all trainers are on this machine: then shared memory is used.",
        "--one-host/--several-hosts",
    )
    capacity_rows: int = option(
        0, "Rows of Q plus K/V that it takes in one tick; 0: what fits the memory for messages."
    )
    buffer_limit_bytes: int = option(
        0,
        "Memory for messages, in MiB; default: 0, no limit.",
        "--buffer-limit-mib",
        read=Read(int, _bytes_of_limit),
    )
    profile_dir: Path = option(
        PROFILE_DIR,
        "Where measured cost profiles are kept; default: ~/.cache/distca.",
        show_default=False,
    )
    connect_seconds: float = option(
        default_seconds("connect_seconds"), "How long to look for the control plane at start."
    )
    control_plane_timeout_seconds: float = option(
        default_seconds("control_plane_timeout_seconds"),
        "How long to serve planned steps while the control plane is away.",
    )
    stuck_seconds: float = option(
        default_seconds("stuck_seconds"),
        "Exit with an error after so long with work and none of it finished.",
    )
    drain_seconds: float = option(
        default_seconds("drain_seconds"), "How long planned steps may take to finish on SIGTERM."
    )
    address_file: Path | None = option(
        None, "File to write the bound addresses to, as JSON, once it serves."
    )
    replace: bool = option(False, "End the membership of a live server of this id.", "--replace")
    reply_timeout_seconds: float = default_seconds("reply_timeout_seconds")

    def __post_init__(self) -> None:
        super().__post_init__()
        control_planes = hosts_of("control_plane", self.control_plane)
        take_own_address(self, towards=control_planes)
        if not self.profile_shapes:
            raise ValueError("profile_shapes is empty; give the shape of at least one model")
        check_name("server_id", self.server_id)
        check_device("device", self.device)
        object.__setattr__(self, "transport", check_transport(self.transport))
        check_seconds(self)
        check_port(self, "data_port", "metrics_port")
        check_least(self, capacity_rows=0, buffer_limit_bytes=0)
        if self.buffer_limit_bytes:
            rows_within(self.buffer_limit_bytes, self.profile_shapes)
        check_order(known_timeouts(self))
        check_host(self, "data_host")
        rows_host(self.data_host, self.data_interface)

    @property
    def rows_host(self) -> str:
        """The address at which rows are exchanged."""
        return rows_host(self.data_host, self.data_interface)

    @property
    def planned_rows(self) -> int:
        """The capacity that the planner counts with; 0 is without limit."""
        if self.capacity_rows or not self.buffer_limit_bytes:
            return self.capacity_rows
        return rows_within(self.buffer_limit_bytes, self.profile_shapes)
