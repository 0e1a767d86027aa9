"""A WireGuard interface of this machine: the kernel's, or wireguard-go's where it has none."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network

from distca.wireguard.peers import Peer
from distca.wireguard.tools import (
    COMMAND_SECONDS,
    InterfaceExistsError,
    PortTakenError,
    TunnelError,
    missing,
    run_tool,
)

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05


class Tunnel:
    """An interface, from :meth:`open` to :meth:`close`.

    Args:
        name: of the interface.
        port: UDP port that it listens on.
        private_text: its private key, in base64.
        mtu: largest packet that it takes, in bytes.
    """

    def __init__(self, name: str, *, port: int, private_text: str, mtu: int) -> None:
        self.name = name
        self._port = port
        self._private_text = private_text
        self._mtu = mtu
        self._daemon: subprocess.Popen[bytes] | None = None
        self._is_ours = False

    def open(self, *, replace: bool) -> None:
        """Makes the interface, without address or peers.

        Args:
            replace: remove one of the same name first, which a killed process has left.

        Raises:
            TunnelError: a program is missing, the process may not, the name or the port is taken.
        """
        for tool in ("ip", "wg"):
            if shutil.which(tool) is None:
                raise missing(tool)
        if self._exists():
            if not replace:
                raise InterfaceExistsError(
                    f"there is an interface {self.name}: another 'distca wireguard' uses it, or "
                    "one that was killed has left it; give another name with --interface, or "
                    "--replace to remove it"
                )
            run_tool("ip", "link", "delete", "dev", self.name)
        self._check_port()
        try:
            run_tool("ip", "link", "add", "dev", self.name, "type", "wireguard")
            self._is_ours = True
        except TunnelError as error:
            if "Unknown device type" not in str(error) and "not supported" not in str(error):
                raise
            self._start_daemon(error)

    def bring_up(self, address: IPv4Address, network: IPv4Network) -> None:
        """Gives it its address, and a route to the network.

        Raises:
            TunnelError: that failed.
        """
        self.set_peers(())
        inside = f"{address}/{network.prefixlen}"
        run_tool("ip", "address", "replace", inside, "dev", self.name)
        run_tool("ip", "link", "set", "dev", self.name, "mtu", str(self._mtu), "up")

    def set_peers(self, peers: Sequence[Peer]) -> None:
        """Lets these peers in and nobody else; what goes on with those that stay is not disturbed.

        Raises:
            TunnelError: that failed.
        """
        # By standard input: arguments are for everybody to see.
        own = f"[Interface]\nPrivateKey = {self._private_text}\nListenPort = {self._port}\n"
        text = own + "".join(peer.configuration for peer in peers)
        run_tool("wg", "syncconf", self.name, "/dev/stdin", stdin=text)

    def check(self) -> None:
        """Checks that the interface is there.

        Raises:
            TunnelError: somebody has removed it, or wireguard-go has ended.
        """
        if not self._exists():
            raise TunnelError(
                f"interface {self.name} is gone: somebody has removed it, or wireguard-go has "
                "ended; start again"
            )

    def close(self) -> None:
        """Removes the interface. Idempotent; what goes wrong is logged."""
        if self._is_ours and self._exists():
            try:
                run_tool("ip", "link", "delete", "dev", self.name)
            except TunnelError as error:
                logger.warning("interface %s may be left: %s", self.name, error)
        self._is_ours = False
        if self._daemon is not None:
            # It ends by itself with its interface.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._daemon.wait(1.0)
            if self._daemon.poll() is None:
                self._daemon.terminate()
                try:
                    self._daemon.wait(COMMAND_SECONDS)
                except subprocess.TimeoutExpired:
                    self._daemon.kill()
                    self._daemon.wait(COMMAND_SECONDS)
            self._daemon = None

    def _exists(self) -> bool:
        # Of this network namespace, also where /sys shows another one.
        return self.name in (name for _, name in socket.if_nameindex())

    def _check_port(self) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.bind(("0.0.0.0", self._port))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise PortTakenError(
                        f"UDP port {self._port} is taken; give another one with --port, and let "
                        "it through the firewall"
                    ) from error
                raise TunnelError(
                    f"UDP port {self._port} cannot be had: {error}; give another one with --port"
                ) from error

    def _start_daemon(self, why: TunnelError) -> None:
        if shutil.which("wireguard-go") is None:
            raise TunnelError(
                f"{why}; the kernel has no WireGuard (5.6 or newer has; modprobe wireguard), and "
                "wireguard-go, which does the same in user space, is not installed"
            )
        logger.info("the kernel has no WireGuard; wireguard-go encrypts in user space")
        with tempfile.TemporaryFile() as said:
            self._daemon = subprocess.Popen(
                ["wireguard-go", "--foreground", self.name],
                env={**os.environ, "LOG_LEVEL": "error"},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                # Ctrl-C is for this process, which ends it in its turn.
                start_new_session=True,
            )
            self._is_ours = True
            deadline = time.monotonic() + COMMAND_SECONDS
            while not self._answers():
                if self._daemon.poll() is not None or time.monotonic() > deadline:
                    said.seek(0)
                    last = said.read().decode(errors="replace").strip().rpartition("\n")[2]
                    raise TunnelError(
                        f"wireguard-go did not start: {last or 'it said nothing'}; it needs "
                        "CAP_NET_ADMIN and /dev/net/tun"
                    )
                time.sleep(_POLL_SECONDS)

    def _answers(self) -> bool:
        try:
            run_tool("wg", "show", self.name, "public-key")
        except TunnelError:
            return False
        return True
