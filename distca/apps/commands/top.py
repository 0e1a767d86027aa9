"""``distca top``: what a cluster does now."""

from __future__ import annotations

from dataclasses import dataclass

from distca.apps.top.settings import Watch
from distca.contract.settings import ClientTls, values_of
from distca.contract.timeouts import default_seconds
from distca.options import option, options_from


@dataclass(frozen=True, kw_only=True)
class TopOptions:
    """Whom to ask."""

    control_plane: str = option(
        "localhost:7700", "host:port of the control plane.", envvar="DISTCA_CONTROL_PLANE"
    )
    timeout_seconds: float = option(
        default_seconds("ask_seconds"), "The control plane must answer within this time."
    )


@options_from
def top(options: TopOptions, shown: Watch, tls: ClientTls) -> None:
    """Watch servers and jobs in the terminal: load, balance, GB/s. Needs a certificate with the
    role operator or read-only where the control plane asks for one.
    """
    from rich.console import Console

    from distca.apps.commands.usage import as_usage_error
    from distca.apps.top.run import watch
    from distca.contract import rpc

    console = Console()
    with as_usage_error():
        settings = rpc.RpcSettings(
            address=options.control_plane,
            connect_seconds=options.timeout_seconds,
            call_seconds=options.timeout_seconds,
            **values_of(ClientTls, tls),
        )
    watch(settings, shown, console)
