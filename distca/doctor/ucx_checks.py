"""UCX and the ways that it finds; where ucxx is not installed, that is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from distca.doctor.finding import Finding, failed, passed
from distca.doctor.surroundings import Surroundings
from distca.doctor.ucx_library import ucx_version


def check_ucx(around: Surroundings) -> Iterable[Finding]:
    """Is UCX there, and does it work between two processes of this machine?"""
    version = ucx_version()
    if version is None:
        yield failed(
            "ucx",
            "ucxx cannot be imported",
            "install extra ucxx-cu12 or ucxx-cu13 (distca[ucxx-cu13]); both work without a GPU",
        )
        return
    from distca.doctor.path_checks import self_tests

    yield passed("ucx", version)
    yield from self_tests(around)


def check_peers(around: Surroundings) -> Iterable[Finding]:
    """How fast is the way to others?"""
    if ucx_version() is None:
        if around.settings.peers:
            yield failed("peers", "ucxx cannot be imported", "mend what check ucx says first")
        return
    from distca.doctor.path_checks import ways_to_peers

    yield from ways_to_peers(around)


UCX_CHECKS: dict[str, Callable[[Surroundings], Iterable[Finding]]] = {
    "ucx": check_ucx,
    "peers": check_peers,
}
