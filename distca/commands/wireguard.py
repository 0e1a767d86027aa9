"""``distca wireguard``: this machine's place in the encrypted data network."""

from __future__ import annotations

import typer

from distca.options import options_from
from distca.wireguard.settings import MemberSettings


@options_from
def wireguard(settings: MemberSettings) -> None:
    """Join the encrypted data network: makes a WireGuard interface, prints the address to give as
    --data-host to nodes and trainers of this machine, and keeps the keys of the other members up to
    date until SIGTERM. Needs root, or CAP_NET_ADMIN, and a certificate of a server or trainer."""
    from distca.wireguard.member import run

    run(settings, typer.echo)
