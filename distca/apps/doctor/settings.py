"""Options of an examination; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from core_attention.shape import AttentionShape, parse_shape
from data_plane.interfaces import OWN_ADDRESS, own_address, rows_host
from data_plane.transport import TransportName, check_transport
from distca.contract.checks import check_host, check_least, check_seconds
from distca.contract.timeouts import default_seconds
from distca.options import Read, option


def _is_gpu(device: str) -> bool:
    kind, _, index = device.partition(":")
    return kind == "cuda" and index.isdecimal()


@dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """The node's purpose, and the processes that it must reach."""

    device: str = option("cpu", "cpu or cuda:INDEX.")
    also_devices: tuple[str, ...] = option(
        (),
        "Another GPU that is to be fit, and its kernels; may be given several times.",
        "--also-device",
        metavar="cuda:INDEX",
    )
    shapes: tuple[AttentionShape, ...] = option(
        (),
        "Attention shape that the kernel must run; may be given several times.",
        "--shape",
        metavar="HEADS:KV_HEADS:HEAD_DIM:DTYPE",
        read=Read(str, parse_shape),
    )
    data_host: str = option(
        OWN_ADDRESS,
        "Address of this machine that others reach; auto: what its name stands for, or where "
        "that is loopback the address towards the control plane.",
    )
    data_interface: str = option(
        "",
        "Network interface whose IPv4 address others reach, for example net1, instead of "
        "--data-host.",
    )
    transport: str = option(TransportName.AUTO, "auto, ucxx, nixl or nixl:libfabric.")
    one_host: bool = option(
        False,
        "Whether trainers and servers share this machine, and its shared memory.",
        "--one-host/--several-hosts",
    )
    rdma: bool = option(False, "The network that data is to travel over.", "--rdma/--tcp")
    pool: bool = option(True, "Compare with the attention nodes that the control plane names.")
    min_gigabytes_per_second: float = option(0.0, "A slower way is a failure; 0 asks for nothing.")
    probe_seconds: float = option(
        default_seconds("probe_seconds"), "One measurement may take this long."
    )
    skip: frozenset[str] = option(
        frozenset(),
        "Check to leave out, by the name that stands in its line; may be given several times.",
        metavar="CHECK",
    )

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
