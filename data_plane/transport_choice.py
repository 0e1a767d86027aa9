"""The transport of a process, and why: facts in, the choice and its reason in words out."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Final

from data_plane.rdma import RdmaPort
from data_plane.transport import TransportName
from data_plane.transport_facts import INSTALL_NIXL, TransportFacts

_PREFERRED: Final = (TransportName.UCXX, TransportName.NIXL)
_DRIVERS: Final = {TransportName.NIXL: "mlx5", TransportName.LIBFABRIC: "efa"}
"""The devices that nixl's back ends carry, by their drivers' names."""

_INSTALL_UCXX: Final = "pip install 'distca[ucxx-cu13]' (or ucxx-cu12)"
_NO_DEVICE: Final = (
    "load the driver; in a pod request the device plugin's resource (chart: rdma.resourceName)"
)
_DEVICE_FILES: Final = (
    "in a pod request the RDMA device plugin's resource (chart: rdma.enabled and "
    "rdma.resourceName), in Docker give --device=/dev/infiniband, on the machine modprobe ib_uverbs"
)
MEMLOCK: Final = (
    "ulimit -l unlimited; in Docker --ulimit memlock=-1; in a pod LimitMEMLOCK=infinity for the "
    "container runtime, or capability IPC_LOCK, which counts for root alone"
)
_SYSTEM_UCX: Final = (
    "install a UCX built with verbs and set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true for ucxx"
)


@dataclass(frozen=True)
class Obstacle:
    """An obstacle between rows and the RDMA devices, and what to do about it."""

    says: str
    advice: str


@dataclass(frozen=True, kw_only=True)
class TransportChoice:
    """The transport of a process.

    Attributes:
        name: of the transport, not auto.
        reason: why, in words.
        rdma: rows travel over RDMA.
        obstacles: what keeps them from the RDMA devices that are there; empty if nothing does,
            there are none, or somebody wants it so.
    """

    name: TransportName
    reason: str
    rdma: bool = False
    obstacles: tuple[Obstacle, ...] = ()

    @property
    def idle(self) -> str:
        """The reasons why the RDMA devices lie idle; empty if they do not."""
        return "; ".join(obstacle.says for obstacle in self.obstacles)

    @property
    def advice(self) -> str:
        """The advice about them."""
        return "; ".join(obstacle.advice for obstacle in self.obstacles)


def choose_transport(
    facts: TransportFacts, *, one_host: bool, peers: Collection[TransportName] = ()
) -> TransportChoice:
    """The transport that ``auto`` stands for.

    Peers win, since all processes of a job use the same one. Then: ucxx on one host and over TCP,
    where it is the faster one; over RDMA whichever can use the devices, ucxx first, which can only
    if somebody has given it a UCX with verbs.

    Args:
        facts: of this machine.
        one_host: every peer runs on this host.
        peers: what the servers of the pool use, if it has any.
    """
    if not facts.installed:
        raise ImportError(f"neither ucxx nor nixl is installed: {_INSTALL_UCXX}, or {INSTALL_NIXL}")
    own = _choose_alone(facts, one_host=one_host)
    if not peers or own.name in peers:
        return own
    theirs = " and ".join(sorted(peers))
    possible = [name for name in sorted(peers) if name in facts.installed]
    if not possible:
        advice = _INSTALL_UCXX if TransportName.UCXX in peers else INSTALL_NIXL
        raise ImportError(f"the servers of the pool use {theirs}, which is not installed: {advice}")
    return _follow(possible[0], own, facts, one_host=one_host)


def named_transport(
    name: TransportName, facts: TransportFacts, *, one_host: bool
) -> TransportChoice:
    """The choice for ``name``, not auto, that somebody has given. ucxx by name is how TCP is
    asked for where there are RDMA devices."""
    choice = TransportChoice(name=name, reason="it was given by name")
    if one_host or not facts.ports or facts.left_out_by:
        return choice
    found = obstacles(facts, name)
    if found:
        return choice if name is TransportName.UCXX else replace(choice, obstacles=found)
    return replace(choice, reason=f"{choice.reason}; {_can_use(facts, name)}", rdma=True)


def obstacles(facts: TransportFacts, name: TransportName) -> tuple[Obstacle, ...]:
    """The obstacles between transport ``name`` and the RDMA devices; empty if it can use one."""
    return (*_of_machine(facts), *_of_library(facts, name))


def _choose_alone(facts: TransportFacts, *, one_host: bool) -> TransportChoice:
    candidates = [name for name in _PREFERRED if name in facts.installed]

    def over_tcp(why: str) -> TransportChoice:
        name = candidates[0]
        return TransportChoice(
            name=name, reason=why if name is _PREFERRED[0] else "it alone is installed"
        )

    if one_host:
        return over_tcp("all processes share this machine's memory and NVLink")
    if not facts.ports:
        return over_tcp("there is no RDMA device, and over TCP it is the faster one")
    if facts.left_out_by:
        return over_tcp(f"{facts.left_out_by} leaves RDMA out, and over TCP it is the faster one")
    for name in candidates:
        if not obstacles(facts, name):
            return TransportChoice(name=name, reason=_can_use(facts, name), rdma=True)
    choice = over_tcp("no transport can use the RDMA devices, and over TCP it is the faster one")
    return replace(choice, obstacles=(*_of_machine(facts), *_of_both_libraries(facts)))


def _follow(
    name: TransportName, own: TransportChoice, facts: TransportFacts, *, one_host: bool
) -> TransportChoice:
    """Does as the pool does, though ``own`` would be right for this machine."""
    reason = f"the servers of the pool use {name}"
    followed = named_transport(name, facts, one_host=one_host)
    if followed.rdma:
        return replace(followed, reason=f"{reason}; {_can_use(facts, name)}")
    if not own.rdma:
        return replace(followed, reason=reason, obstacles=own.obstacles)
    idle = Obstacle(
        f"{own.name} can use {_shown(facts, own.name)}, but {reason}",
        f"give the attention nodes their RDMA devices, or all processes --transport={own.name}",
    )
    return replace(followed, reason=reason, obstacles=(idle,))


def _of_machine(facts: TransportFacts) -> tuple[Obstacle, ...]:
    if not facts.ports:
        return (Obstacle("there is no RDMA device", _NO_DEVICE),)
    if not facts.active_ports:
        states = ", ".join(f"{port.name} is {port.state}" for port in facts.ports)
        return (Obstacle(f"no port is active: {states}", "check cable and subnet manager"),)
    found = []
    if facts.left_out_by:
        found.append(Obstacle(f"{facts.left_out_by} leaves RDMA out", "unset it"))
    elif not any(port.opens for port in facts.wanted_ports):
        devices = ", ".join(sorted({port.device for port in facts.wanted_ports}))
        found.append(Obstacle(f"no /dev/infiniband/uverbs* of {devices} opens", _DEVICE_FILES))
    if not facts.may_lock_enough:
        locked = f"{(facts.locked_bytes or 0) / 2**20:.4g} MiB"
        found.append(Obstacle(f"only {locked} of memory may be locked", MEMLOCK))
    return tuple(found)


def _of_library(facts: TransportFacts, name: TransportName) -> tuple[Obstacle, ...]:
    installed = name in facts.installed
    if name is TransportName.UCXX:
        if not installed:
            return (Obstacle("ucxx is not installed", _INSTALL_UCXX),)
        if facts.active_ports and not facts.ucxx_has_verbs:
            return (Obstacle("the UCX of ucxx has no verbs", _SYSTEM_UCX),)
        return ()
    if not installed:
        return (Obstacle("nixl is not installed", INSTALL_NIXL),)
    ports = [port for port in facts.wanted_ports if port.opens] or facts.wanted_ports
    if ports and not any(port.driver_is(_DRIVERS[name]) for port in ports):
        drivers = ", ".join(sorted({port.driver or port.device for port in ports}))
        is_efa = any(port.driver_is(_DRIVERS[TransportName.LIBFABRIC]) for port in ports)
        return (
            Obstacle(
                f"{name} has drivers for {_DRIVERS[name]} alone, not for {drivers}",
                f"give --transport={TransportName.LIBFABRIC}" if is_efa else _SYSTEM_UCX,
            ),
        )
    return ()


def _of_both_libraries(facts: TransportFacts) -> tuple[Obstacle, ...]:
    """The obstacles of both; nothing if one of them could. Mending one is enough."""
    found = [_of_library(facts, name) for name in (TransportName.NIXL, TransportName.UCXX)]
    if not all(found):
        return ()
    says = dict.fromkeys(each.says for (each,) in found)
    advice = dict.fromkeys(each.advice for (each,) in found)
    return (Obstacle(" and ".join(says), ", or ".join(advice)),)


def _can_use(facts: TransportFacts, name: TransportName) -> str:
    return f"it can use {_shown(facts, name)}"


def _shown(facts: TransportFacts, name: TransportName) -> str:
    ports: Iterable[RdmaPort] = (port for port in facts.wanted_ports if port.opens)
    if name in _DRIVERS:
        ports = (port for port in ports if port.driver_is(_DRIVERS[name]))
    return ", ".join(str(port) for port in ports)
