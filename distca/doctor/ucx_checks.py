"""The transport's library and the ways that it finds; where it is not installed, that is a finding
too."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from data_plane.transports import TransportName
from distca.doctor.finding import Finding, failed, passed
from distca.doctor.surroundings import Surroundings
from distca.doctor.ucx_library import nixl_version, ucx_version

_INSTALL = {
    TransportName.UCXX: "install extra ucxx-cu12 or ucxx-cu13 (distca[ucxx-cu13]); both work "
    "without a GPU",
    TransportName.NIXL: "install extra nixl-cu12 or nixl-cu13 (distca[nixl-cu13]); both work "
    "without a GPU",
}


def check_ucx(around: Surroundings) -> Iterable[Finding]:
    """Is the library there, and does it work between two processes of this machine?"""
    transport = TransportName(around.settings.transport)
    version = _version(transport)
    if version is None:
        yield failed("ucx", f"{transport} cannot be imported", _INSTALL[transport])
        return
    from distca.doctor.path_checks import self_tests

    yield passed("ucx", version)
    yield from self_tests(around)


def check_peers(around: Surroundings) -> Iterable[Finding]:
    """How fast is the way to others?"""
    transport = TransportName(around.settings.transport)
    if _version(transport) is None:
        if around.settings.peers:
            advice = "mend what check ucx says first"
            yield failed("peers", f"{transport} cannot be imported", advice)
        return
    from distca.doctor.path_checks import ways_to_peers

    yield from ways_to_peers(around)


def _version(transport: TransportName) -> str | None:
    return nixl_version() if transport is TransportName.NIXL else ucx_version()


UCX_CHECKS: dict[str, Callable[[Surroundings], Iterable[Finding]]] = {
    "ucx": check_ucx,
    "peers": check_peers,
}
