"""The programs that make and set a WireGuard interface: each with a deadline, and with errors that
say what to do."""

from __future__ import annotations

import subprocess

from distca.contract.timeouts import default_seconds

COMMAND_SECONDS = default_seconds("tunnel_command_seconds")
"""How long one of the programs may take."""


class TunnelError(Exception):
    """The interface cannot be made or set; the message says why and what to do."""


class NoToolError(TunnelError):
    """A program is not installed."""


class NoPrivilegeError(TunnelError):
    """The process may not set up network interfaces."""


class InterfaceExistsError(TunnelError):
    """There is an interface of that name."""


class PortTakenError(TunnelError):
    """Another process has the UDP port."""


_PACKAGES = {"ip": "iproute2", "wg": "wireguard-tools", "wireguard-go": "wireguard-go"}


def run_tool(*command: str, stdin: str = "") -> str:
    """Runs a program to its end; returns what it wrote.

    Args:
        command: the program and its arguments, which others can see: nothing secret.
        stdin: what it reads.

    Raises:
        TunnelError: it failed, or did not end in time; a subclass for what is known.
    """
    try:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
        )
    except FileNotFoundError as error:
        raise missing(command[0]) from error
    except subprocess.TimeoutExpired as error:
        raise TunnelError(
            f"{' '.join(command)} did not end within {COMMAND_SECONDS:g} s; is the machine stuck?"
        ) from error
    if done.returncode == 0:
        return done.stdout
    said = f"{' '.join(command)} failed: {done.stderr.strip()}"
    if "not permitted" in done.stderr or "Permission denied" in done.stderr:
        raise NoPrivilegeError(
            f"{said}; setting up a network interface needs CAP_NET_ADMIN: run as root, or give the "
            "container this capability (docker run --cap-add NET_ADMIN)"
        )
    raise TunnelError(said)


def missing(tool: str) -> NoToolError:
    """The error that ``tool`` is not installed."""
    package = _PACKAGES[tool]
    return NoToolError(f"{tool} is not installed: apt-get install {package}, or the like")
