"""``distca certs``: certificates for development."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer

from distca.contract.checks import check_least
from distca.options import option, options_from

DEFAULT_NAME = "default"
MOST_DAYS = 36500

app = typer.Typer(no_args_is_help=True, help="Make certificates for development.")


@dataclass(frozen=True, kw_only=True)
class MakeOptions:
    """The certificates to make, their lifetime and their folder."""

    folder: Annotated[Path, typer.Argument(help="Where to write them; made if it is not there.")]
    role: Annotated[
        list[str],
        typer.Option(
            help="Role to make a certificate for: trainer, server, operator, read-only or "
            "control-plane; may be given several times; default: all."
        ),
    ] = field(default_factory=list)
    name: str = option(
        DEFAULT_NAME,
        "Name in the certificates: for a trainer the tenant, whose jobs nobody else can touch. "
        "Files of another name than the default are called ROLE-NAME.",
    )
    host: Annotated[
        list[str],
        typer.Option(
            help="DNS name or IP address under which the control plane is reached, beside "
            "localhost and this machine; may be given several times."
        ),
    ] = field(default_factory=list)
    days: int = option(30, "How long the certificates are good.")
    authority_days: int = option(365, "The same of a new authority.")
    force: bool = option(False, "Replace certificates that are there.", "--force")

    def __post_init__(self) -> None:
        check_least(self, days=1, authority_days=1)
        for name in ("days", "authority_days"):
            if getattr(self, name) > MOST_DAYS:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 1 to {MOST_DAYS}")


@app.command("make")
@options_from
def make(options: MakeOptions) -> None:
    """Make an authority, unless FOLDER has one, and a certificate for each role.

    For development only: the authority's key lies beside the rest. In production use cert-manager
    or your own authority.
    """
    import socket

    from rich.console import Console

    from distca.apps.certs.folder import CertificateFolder, default_stem
    from distca.apps.commands.usage import as_usage_error
    from distca.contract.identity import Identity, Role
    from distca.process.plain_text import plain

    with as_usage_error():
        roles = [Role(role) for role in options.role] or list(Role)
        identities = [Identity(role=role, name=options.name) for role in roles]
    stems = [default_stem(identity, DEFAULT_NAME) for identity in identities]
    folder = CertificateFolder(options.folder, force=options.force)
    folder.check_free(stems)
    lifetime = timedelta(days=options.days)
    authority = folder.authority(timedelta(days=options.authority_days), lifetime)
    hosts = ["localhost", "127.0.0.1", "::1", socket.gethostname(), *options.host]
    console = Console(soft_wrap=True)
    for identity, stem in zip(identities, stems, strict=True):
        names = hosts if identity.role is Role.CONTROL_PLANE else []
        signed = authority.issue(identity, lifetime=lifetime, names=dict.fromkeys(names))
        path = folder.add(stem, signed)
        console.print(plain(f"{path}  {identity.uri}"), highlight=False, markup=False)
