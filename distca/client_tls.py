"""Options of clients of the control plane for TLS."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_PANEL = "TLS"


@dataclass(frozen=True, kw_only=True)
class ClientTls:
    """Certificates for the way to the control plane; plaintext without them."""

    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="Certificate authority of the control plane; turns TLS on.",
            envvar="DISTCA_TLS_CA",
            rich_help_panel=_PANEL,
        ),
    ] = None
    tls_certificate: Annotated[
        Path | None,
        typer.Option(
            help="Certificate of this process, for mTLS.",
            envvar="DISTCA_TLS_CERTIFICATE",
            rich_help_panel=_PANEL,
        ),
    ] = None
    tls_key: Annotated[
        Path | None,
        typer.Option(help="Its private key.", envvar="DISTCA_TLS_KEY", rich_help_panel=_PANEL),
    ] = None

    tls_server_name: Annotated[
        str | None,
        typer.Option(
            help="Name that the certificate of the control plane must have; default: its host.",
            envvar="DISTCA_TLS_SERVER_NAME",
            rich_help_panel=_PANEL,
        ),
    ] = None

    tls_check_seconds: Annotated[
        float,
        typer.Option(
            help="How often the files are looked at; new certificates are taken into use while it "
            "works.",
            envvar="DISTCA_TLS_CHECK_SECONDS",
            rich_help_panel=_PANEL,
        ),
    ] = 10.0

    def __post_init__(self) -> None:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("tls_certificate and tls_key belong together: give both or neither")
        if self.tls_certificate is not None and self.tls_ca is None:
            raise ValueError("tls_certificate needs tls_ca, by which the control plane is checked")
