"""What a member of the encrypted data network may choose; the fields are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from data_plane.interfaces import OWN_ADDRESS, take_own_address
from distca.contract.addresses import hosts_of
from distca.contract.checks import check_seconds
from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import default_seconds

if TYPE_CHECKING:
    from distca.contract.rpc import RpcSettings

MAX_NAME_BYTES = 15
"""Of a network interface's name: the kernel's limit."""

_MTU_BYTES = range(576, 65536)


@dataclass(frozen=True, kw_only=True)
class MemberSettings(ClientTls):
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
            help="Address of this machine that other members send UDP to; auto: what its name "
            "stands for, or where that is loopback the address towards the control plane."
        ),
    ] = OWN_ADDRESS
    port: Annotated[int, typer.Option(help="UDP port that members listen on.")] = 51820
    interface: Annotated[str, typer.Option(help="Name of the interface that is made.")] = "distca0"
    mtu: Annotated[
        int, typer.Option(help="MTU of the interface: 80 less than that of the network below.")
    ] = 1420
    replace: Annotated[
        bool,
        typer.Option(
            help="Remove an interface of that name first, which a killed process has left."
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
    ] = default_seconds("connect_seconds")
    address_file: Annotated[
        Path | None,
        typer.Option(help="File to write address and interface to, as JSON, once rows can go."),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds(self)
        control_planes = hosts_of("control_plane", self.control_plane)
        take_own_address(self, "host", towards=control_planes)
        try:
            ip_address(self.host)
        except ValueError as error:
            raise ValueError(
                f"host is {self.host!r}; it must be the IP address that other machines reach this "
                "one at"
            ) from error
        if not 0 < self.port < 2**16:
            raise ValueError(f"port is {self.port}; it must be 1 to 65535")
        is_name = self.interface.isascii() and self.interface.replace("-", "").isalnum()
        if not is_name or self.interface[0] == "-" or len(self.interface) > MAX_NAME_BYTES:
            raise ValueError(
                f"interface is {self.interface!r}; it must be 1 to {MAX_NAME_BYTES} letters and "
                "digits, for example distca0"
            )
        if self.mtu not in _MTU_BYTES:
            raise ValueError(
                f"mtu is {self.mtu}; it must be {_MTU_BYTES.start} to {_MTU_BYTES.stop - 1} bytes, "
                "1420 where the network's is 1500"
            )
        if self.certificate_file is None:
            raise ValueError(
                "tls_certificate is not given; keys are handed out over mutual TLS alone: give "
                "tls_ca, tls_certificate and tls_key"
            )

    @property
    def endpoint(self) -> str:
        """What other members send their packets to."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def rpc(self) -> RpcSettings:
        """How to reach the control plane."""
        # Not above: it needs gRPC, which the command line's help does without.
        from distca.contract.rpc import RpcSettings

        return RpcSettings(
            address=self.control_plane,
            connect_seconds=self.connect_seconds,
            **values_of(ClientTls, self),
        )
