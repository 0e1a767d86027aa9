"""The transport, its library and the ways that it finds; where it is not installed, that is a
finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from data_plane.transport import TransportName
from data_plane.transport_choice import TransportChoice
from distca.doctor.finding import Finding, failed, passed, warned
from distca.doctor.surroundings import Surroundings
from distca.doctor.ucx_library import nixl_version, ucx_version

_INSTALL = {
    TransportName.UCXX: "install extra ucxx-cu12 or ucxx-cu13 (distca[ucxx-cu13]); both work "
    "without a GPU",
    TransportName.NIXL: "install extra nixl-cu12 or nixl-cu13 (distca[nixl-cu13]); both work "
    "without a GPU",
}
_MEND = "mend what check transport says first"


def check_transport(around: Surroundings) -> Iterable[Finding]:
    """Which transport is it, why, and do the servers of the pool use it too?"""
    try:
        choice = around.transport
    except ImportError as error:
        yield failed("transport", str(error), "install it, on every machine of the job")
        return
    yield judge_transport(choice, around.pool_transports)


def judge_transport(choice: TransportChoice, pool: frozenset[TransportName]) -> Finding:
    """Whether a choice fits the pool's servers."""
    says = f"{choice.name}: {choice.reason}"
    if pool and choice.name not in pool:
        theirs = " and ".join(sorted(pool))
        return failed(
            "transport",
            f"{says}, but the servers of the pool use {theirs}",
            f"give all processes of a job the same: --transport={theirs}, or auto",
        )
    if len(pool) > 1:
        return warned(
            "transport",
            f"{says}; the servers of the pool use {' and '.join(sorted(pool))}",
            f"give all attention nodes the same: others are no use to a job on {choice.name}",
        )
    return passed("transport", says)


def check_ucx(around: Surroundings) -> Iterable[Finding]:
    """Is the library there, and does it work between two processes of this machine?"""
    name = _name(around)
    if name is None:
        yield failed("ucx", "there is no transport to try", _MEND)
        return
    version = _version(name)
    if version is None:
        yield failed("ucx", f"{name} cannot be imported", _INSTALL[name])
        return
    from distca.doctor.path_checks import self_tests

    yield passed("ucx", version)
    yield from self_tests(around)


def check_peers(around: Surroundings) -> Iterable[Finding]:
    """How fast is the way to others?"""
    name = _name(around)
    if name is None or _version(name) is None:
        if around.settings.peers:
            says = f"{name} cannot be imported" if name else "there is no transport to try"
            yield failed("peers", says, "mend what check ucx says first")
        return
    from distca.doctor.path_checks import ways_to_peers

    yield from ways_to_peers(around)


def _name(around: Surroundings) -> TransportName | None:
    """The transport; None if none is installed, which check transport tells."""
    try:
        return around.transport.name
    except ImportError:
        return None


def _version(transport: TransportName) -> str | None:
    return nixl_version() if transport is TransportName.NIXL else ucx_version()


UCX_CHECKS: dict[str, Callable[[Surroundings], Iterable[Finding]]] = {
    "transport": check_transport,
    "ucx": check_ucx,
    "peers": check_peers,
}
