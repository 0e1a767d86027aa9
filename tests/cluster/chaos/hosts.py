"""Hosts for processes: this machine's loopback, or network namespaces that a switch joins.

A namespace has one network card, ``eth0``, whose cable goes to a bridge in a namespace of its own.
Links can be cut (packets are dropped silently, as by a dead switch, in both directions or in one),
unplugged (the card sees it), made lossy or slow. Everything that is made here carries a name that
begins with ``dca`` and this process's id, and goes when the network is closed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from tests.cluster.chaos.cable import Cable
from tests.support.programs import ran

COMMAND_SECONDS = 20.0
CARD = "eth0"


class Direction(StrEnum):
    """Which packets of a host are hit."""

    BOTH = "both"
    IN = "in"
    OUT = "out"

    @property
    def chains(self) -> list[str]:
        """The packet filter's chains that they pass."""
        return {"both": ["INPUT", "OUTPUT"], "in": ["INPUT"], "out": ["OUTPUT"]}[self]


@dataclass(frozen=True)
class Host:
    """Where a process runs.

    Attributes:
        name: of the host.
        address: that others reach it at.
        card: its network interface.
        prefix: what a command line begins with so that it runs there.
        alone: whether all hosts are this one.
    """

    name: str
    address: str
    card: str
    prefix: tuple[str, ...] = ()
    alone: bool = False


LOOPBACK = Host("loopback", "127.0.0.1", "lo", alone=True)


def why_no_namespaces(*, cuts: bool = True) -> str | None:
    """Why this machine cannot make networks of namespaces (and cut links in them), or None if it
    can."""
    tools = ("ip", "iptables", "tc") if cuts else ("ip",)
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with network(["probe"]) as links:
            if cuts:
                links.cut("probe")
                links.heal("probe")
    except subprocess.CalledProcessError as error:
        return f"{' '.join(map(str, error.cmd))}: {error.stderr.strip()}"
    return None


@dataclass
class Network:
    """Hosts on a switch, and what can be done to their links."""

    name: str
    hosts: dict[str, Host] = field(default_factory=dict)
    cables: dict[str, Cable] = field(default_factory=dict)

    def cut(self, host: str, direction: Direction = Direction.BOTH) -> None:
        """Packets vanish; nobody is told."""
        self._filter(host, direction, "-j", "DROP")

    def lose(self, host: str, share: float) -> None:
        """A share of all packets vanishes, each way."""
        self._filter(
            host, Direction.BOTH, "-m", "statistic", "--mode", "random",
            "--probability", str(share), "-j", "DROP",
        )  # fmt: skip

    def limit(self, host: str, bits_per_second: int) -> None:
        """The link carries no more than that, each way."""
        shaping = (
            "root",
            "tbf",
            "rate",
            f"{bits_per_second}bit",
            "burst",
            "32kb",
            "latency",
            "500ms",
        )
        self._inside(host, "tc", "qdisc", "add", "dev", CARD, *shaping)
        _run("ip", "netns", "exec", self._switch, "tc", "qdisc", "add", "dev", host, *shaping)

    def delay(self, host: str, seconds: float) -> None:
        """Every packet takes so long, each way. The host was made with a slow cable."""
        self.cables[host].delay(seconds)

    def change_rows(self, host: str, count: int, direction: Direction) -> None:
        """Rows in so many of the host's next TCP segments are changed on the way; returns after the
        first. The host was made with a slow cable."""
        out = count if direction is not Direction.IN else 0
        into = count if direction is not Direction.OUT else 0
        self.cables[host].change_rows((out, into), COMMAND_SECONDS)

    def unplug(self, host: str) -> None:
        """Pulls the cable: the card of the host has no carrier."""
        _run("ip", "-n", self._switch, "link", "set", "dev", host, "down")

    def heal(self, host: str) -> None:
        """The link is as good as new."""
        self._inside(host, "iptables", "-F")
        for where, device in ((self._namespace(host), CARD), (self._switch, host)):
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "exec", where, "tc", "qdisc", "del", "dev", device, "root")
        if host in self.cables:
            self.cables[host].delay(0.0)
        else:
            _run("ip", "-n", self._switch, "link", "set", "dev", host, "up")

    def add(self, host: str, *, slow_cable: bool = False) -> Host:
        """A further host."""
        number, namespace = len(self.hosts) + 1, self._namespace(host)
        made = Host(host, f"10.99.0.{number}", CARD, prefix=("ip", "netns", "exec", namespace))
        self.hosts[host] = made
        _run("ip", "netns", "add", namespace)
        if slow_cable:
            self.cables[host] = Cable((namespace, CARD), (self._switch, host))
        else:
            _run(
                "ip", "link", "add", "name", host, "netns", self._switch, "type", "veth",
                "peer", "name", CARD, "netns", namespace,
            )  # fmt: skip
        _run("ip", "-n", self._switch, "link", "set", "dev", host, "master", "switch", "up")
        _run("ip", "-n", namespace, "address", "add", f"{made.address}/24", "dev", CARD)
        for card in (CARD, "lo"):
            _run("ip", "-n", namespace, "link", "set", "dev", card, "up")
        return made

    def open(self) -> None:
        """Makes the switch."""
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", "switch", "up")

    def close(self) -> None:
        """Takes everything down."""
        for cable in self.cables.values():
            cable.close()
        for namespace in [*map(self._namespace, self.hosts), self._switch]:
            with contextlib.suppress(subprocess.CalledProcessError):
                _run("ip", "netns", "del", namespace)

    @property
    def _switch(self) -> str:
        return f"{self.name}-switch"

    def _namespace(self, host: str) -> str:
        return f"{self.name}-{host}"

    def _filter(self, host: str, direction: Direction, *rule: str) -> None:
        for chain in direction.chains:
            device = "-i" if chain == "INPUT" else "-o"
            self._inside(host, "iptables", "-I", chain, device, CARD, *rule)

    def _inside(self, host: str, *command: str) -> None:
        _run("ip", "netns", "exec", self._namespace(host), *command)


@contextlib.contextmanager
def network(hosts: Sequence[str], *, slow_cables: Sequence[str] = ()) -> Iterator[Network]:
    """Hosts on a switch until the block ends.

    Args:
        hosts: their names, at most 15 characters each.
        slow_cables: those whose link can be delayed; it is slower than the others in any case.

    Raises:
        CalledProcessError: the machine does not allow it.
    """
    made = Network(f"dca{os.getpid()}")
    try:
        made.open()
        for host in hosts:
            made.add(host, slow_cable=host in slow_cables)
        yield made
    finally:
        made.close()


def _run(*command: str) -> None:
    ran(*command, check=True, timeout=COMMAND_SECONDS)
