"""Settings that several processes share; those with a help text are command-line options.

Importing this module is cheap: the command line needs it for ``--help``.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from distca.contract.checks import check_bool, check_least, take_paths
from distca.contract.timeouts import default_seconds

DEFAULT_MAX_MESSAGE_BYTES = 256 * 2**20
"""gRPC's own limit of 4 MiB is too small for the whole plan of a large job."""

PROFILE_DIR = Path.home() / ".cache" / "distca"
"""The folder of cost profiles, unless settings name another."""


class Placement(StrEnum):
    """The servers that run a job's CA-tasks."""

    POOL = "pool"
    IN_PLACE = "in-place"
    MIXED = "mixed"

    @classmethod
    def _missing_(cls, value: object) -> None:
        valid = ", ".join(repr(each.value) for each in cls)
        raise ValueError(f"placement is {value!r}; valid: {valid}")


def values_of(kind: type[Any], settings: object) -> dict[str, Any]:
    """The values that ``settings`` have for the fields of the dataclass ``kind``, by name."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Certificates of a server; read again when the files change. With ``client_ca_file`` clients
    must present a certificate signed by one of these (mTLS)."""

    PANEL: ClassVar = "Security"

    certificate_file: Annotated[
        Path,
        typer.Option(
            "--tls-certificate",
            help="Certificate chain; turns TLS on.",
            envvar="DISTCA_TLS_CERTIFICATE",
        ),
    ]
    key_file: Annotated[
        Path, typer.Option("--tls-key", help="Its private key.", envvar="DISTCA_TLS_KEY")
    ]
    client_ca_file: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            help="Clients must show a certificate of this authority (mTLS).",
            envvar="DISTCA_TLS_CLIENT_CA",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """Certificates for the way to the control plane; plaintext without them. New certificates are
    taken into use by a new contact, see :mod:`distca.contract.rotation`."""

    PANEL: ClassVar = "TLS"

    ca_file: Annotated[
        Path | None,
        typer.Option(
            "--tls-ca",
            help="Certificate authority of the control plane; turns TLS on.",
            envvar="DISTCA_TLS_CA",
        ),
    ] = None
    certificate_file: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate",
            help="Certificate of this process, for mTLS.",
            envvar="DISTCA_TLS_CERTIFICATE",
        ),
    ] = None
    key_file: Annotated[
        Path | None, typer.Option("--tls-key", help="Its private key.", envvar="DISTCA_TLS_KEY")
    ] = None
    server_name: Annotated[
        str | None,
        typer.Option(
            "--tls-server-name",
            help="Name that the certificate of the control plane must have; default: its host.",
            envvar="DISTCA_TLS_SERVER_NAME",
        ),
    ] = None
    certificate_check_seconds: Annotated[
        float,
        typer.Option(
            "--tls-check-seconds",
            help="How often the files are looked at; new certificates are taken into use while it "
            "works.",
            envvar="DISTCA_TLS_CHECK_SECONDS",
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        take_paths(self, "ca_file", "certificate_file", "key_file")
        if (self.certificate_file is None) != (self.key_file is None):
            raise ValueError(
                f"certificate_file is {self.certificate_file} and key_file is {self.key_file}; "
                "mTLS needs both, TLS neither"
            )
        if self.certificate_file is not None and self.ca_file is None:
            raise ValueError(
                f"ca_file is None and certificate_file is {self.certificate_file}; mTLS needs "
                "ca_file, certificate_file and key_file"
            )


@dataclass(frozen=True, kw_only=True)
class RankTimeouts:
    """How long a rank waits for what; see ``docs/configuration.md``."""

    PANEL: ClassVar = "Service"

    start_timeout_seconds: Annotated[
        float, typer.Option(help="To reach the control plane at start.")
    ] = default_seconds("start_timeout_seconds")
    connect_timeout_seconds: Annotated[float, typer.Option(help="To reach a server.")] = (
        default_seconds("connect_timeout_seconds")
    )
    plan_timeout_seconds: Annotated[
        float, typer.Option(help="A step waits this long for its plan.")
    ] = default_seconds("plan_timeout_seconds")
    tick_timeout_seconds: Annotated[
        float, typer.Option(help="One exchange with the servers may take this long.")
    ] = default_seconds("tick_timeout_seconds")
    recovery_timeout_seconds: Annotated[
        float, typer.Option(help="A step that lost a server waits this long for its new plan.")
    ] = default_seconds("recovery_timeout_seconds")
    control_plane_timeout_seconds: Annotated[
        float, typer.Option(help="Training goes on this long without a control plane.")
    ] = default_seconds("control_plane_timeout_seconds")


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A job's wishes for the planning of its core attention."""

    PANEL: ClassVar = "Service"

    tolerance: Annotated[
        float, typer.Option(help="By how much the busiest server may exceed the mean load.")
    ] = 0.03
    planner: Annotated[
        str, typer.Option(help="Name of the planner; default: the control plane's.")
    ] = ""
    min_forward_tokens: Annotated[
        int,
        typer.Option(
            help="Shortest piece that a document is cut into, forward; 0: the planner's default."
        ),
    ] = 0
    min_backward_tokens: Annotated[int, typer.Option(help="The same for the backward pass.")] = 0

    def __post_init__(self) -> None:
        check_least(self, tolerance=0, min_forward_tokens=0, min_backward_tokens=0)


@dataclass(frozen=True, kw_only=True)
class IntegritySettings:
    """Measures against silent corruption."""

    PANEL: ClassVar = "Service"

    checksums: Annotated[
        bool | None,
        typer.Option(
            help="Messages carry a checksum under a key; default: those that leave their host."
        ),
    ] = None
    check_results: Annotated[
        bool | None,
        typer.Option(help="Look for NaN and Inf in servers' results; default: on the CPU."),
    ] = None
    audit_rate: Annotated[
        float,
        typer.Option(
            "--audit",
            metavar="RATE",
            help="Share of the servers' tasks that trainers recompute and compare, 0 to 1.",
        ),
    ] = 0.0

    def seals(self, *, leaves_host: bool) -> bool:
        """Decides whether the messages of a connection carry a checksum."""
        return leaves_host if self.checksums is None else self.checksums

    def __post_init__(self) -> None:
        check_bool(self, "checksums", "check_results")
        if not 0 <= self.audit_rate <= 1:
            raise ValueError(f"audit_rate is {self.audit_rate}; it must be a share, 0 to 1")
