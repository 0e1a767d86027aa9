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
from distca.options import option

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
    client_ca_file: Path | None = option(
        None,
        "Clients must show a certificate of this authority (mTLS).",
        "--tls-client-ca",
        envvar="DISTCA_TLS_CLIENT_CA",
    )


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """Certificates for the way to the control plane; plaintext without them. New certificates are
    taken into use by a new contact, see :mod:`distca.contract.rotation`."""

    PANEL: ClassVar = "TLS"

    ca_file: Path | None = option(
        None,
        "Certificate authority of the control plane; turns TLS on.",
        "--tls-ca",
        envvar="DISTCA_TLS_CA",
    )
    certificate_file: Path | None = option(
        None,
        "Certificate of this process, for mTLS.",
        "--tls-certificate",
        envvar="DISTCA_TLS_CERTIFICATE",
    )
    key_file: Path | None = option(None, "Its private key.", "--tls-key", envvar="DISTCA_TLS_KEY")
    server_name: str | None = option(
        None,
        "Name that the certificate of the control plane must have; default: its host.",
        "--tls-server-name",
        envvar="DISTCA_TLS_SERVER_NAME",
    )
    certificate_check_seconds: float = option(
        10.0,
        "How often the files are looked at; new certificates are taken into use while it works.",
        "--tls-check-seconds",
        envvar="DISTCA_TLS_CHECK_SECONDS",
    )

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

    start_timeout_seconds: float = option(
        default_seconds("start_timeout_seconds"), "To reach the control plane at start."
    )
    connect_timeout_seconds: float = option(
        default_seconds("connect_timeout_seconds"), "To reach a server."
    )
    plan_timeout_seconds: float = option(
        default_seconds("plan_timeout_seconds"), "A step waits this long for its plan."
    )
    tick_timeout_seconds: float = option(
        default_seconds("tick_timeout_seconds"), "One exchange with the servers may take this long."
    )
    recovery_timeout_seconds: float = option(
        default_seconds("recovery_timeout_seconds"),
        "A step that lost a server waits this long for its new plan.",
    )
    control_plane_timeout_seconds: float = option(
        default_seconds("control_plane_timeout_seconds"),
        "Training goes on this long without a control plane.",
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """A job's wishes for the planning of its core attention."""

    PANEL: ClassVar = "Service"

    tolerance: float = option(0.03, "By how much the busiest server may exceed the mean load.")
    planner: str = option("", "Name of the planner; default: the control plane's.")
    min_forward_tokens: int = option(
        0, "Shortest piece that a document is cut into, forward; 0: the planner's default."
    )
    min_backward_tokens: int = option(0, "The same for the backward pass.")

    def __post_init__(self) -> None:
        check_least(self, tolerance=0, min_forward_tokens=0, min_backward_tokens=0)


@dataclass(frozen=True, kw_only=True)
class IntegritySettings:
    """Measures against silent corruption."""

    PANEL: ClassVar = "Service"

    checksums: bool | None = option(
        None, "Messages carry a checksum under a key; default: those that leave their host."
    )
    check_results: bool | None = option(
        None, "Look for NaN and Inf in servers' results; default: on the CPU."
    )
    audit_rate: float = option(
        0.0,
        "Share of the servers' tasks that trainers recompute and compare, 0 to 1.",
        "--audit",
        metavar="RATE",
    )

    def seals(self, *, leaves_host: bool) -> bool:
        """Decides whether the messages of a connection carry a checksum."""
        return leaves_host if self.checksums is None else self.checksums

    def __post_init__(self) -> None:
        check_bool(self, "checksums", "check_results")
        if not 0 <= self.audit_rate <= 1:
            raise ValueError(f"audit_rate is {self.audit_rate}; it must be a share, 0 to 1")
