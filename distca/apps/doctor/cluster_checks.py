"""Names, control plane, clock, versions."""

from __future__ import annotations

import importlib.metadata
import platform
import socket
import time
from collections.abc import Iterable

from data_plane.interfaces import addresses_of, ipv4_of
from distca import __version__
from distca.apps.doctor.cluster_probe import ClusterAnswer
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.surroundings import Surroundings
from distca.contract.addresses import split_address
from distca.contract.rpc_errors import RpcError
from distca.v1 import cluster_pb2

_CLOCK_WARN_SECONDS = 1.0
_CLOCK_FAIL_SECONDS = 60.0
"""Certificates that were just made seem not good yet, or those about to end seem good still."""


def check_dns(around: Surroundings) -> Iterable[CheckFinding]:
    """Do names resolve, and is the data address this machine's?"""
    settings = around.settings
    if around.cluster is not None:
        for address in around.cluster.settings.addresses:
            yield _resolve(split_address("address", address)[0], "the control plane")
    yield _own_address(settings.rows_host, one_host=settings.one_host)


def _resolve(host: str, whose: str) -> CheckFinding:
    began = time.perf_counter()
    try:
        addresses = addresses_of(host)
    except OSError as error:
        return failed(
            f"{host}, {whose}, does not resolve: {error.strerror or error}",
            "check the name and /etc/resolv.conf; in a pod the Service's name and namespace",
        )
    seconds = time.perf_counter() - began
    says = f"{host} is {', '.join(addresses)}"
    if seconds > 1:
        return warned(
            f"{says}, but that took {seconds:.1f} s",
            "check the name servers in /etc/resolv.conf",
            seconds=seconds,
        )
    return passed(says, seconds=seconds)


def _own_address(data_host: str, *, one_host: bool) -> CheckFinding:
    try:
        ip = ipv4_of(data_host)
        with socket.socket() as probe:
            probe.bind((ip, 0))
    except OSError as error:
        return failed(
            f"data_host {data_host} is no IPv4 address of this machine: {error.strerror or error}",
            "give --data-host the address under which others reach this machine",
        )
    if ip.startswith("127.") and not one_host:
        return warned(
            f"data_host {data_host} is {ip}, which no other machine reaches",
            "give --data-host the address of this machine, or --one-host if all is on it",
        )
    return passed(f"data_host {data_host} is {ip}, of this machine")


def check_control_plane(around: Surroundings) -> Iterable[CheckFinding]:
    """Does it answer?"""
    if around.cluster is None:
        return
    try:
        answer = around.cluster.answer()
    except RpcError as error:
        advice = "see the control plane's log, and what docs/runbook.md says of gRPC's words"
        yield failed(str(error), advice)
        return
    except (OSError, ValueError) as error:
        yield failed(str(error), "mend the files of --tls-*")
        return
    cluster = answer.cluster
    if cluster is None:
        yield passed("answers, and tells this role nothing of the cluster")
    else:
        yield passed(
            f"{around.cluster.settings.address} answers in "
            f"{answer.round_trip_seconds * 1000:.1f} ms: {len(cluster.servers)} servers, "
            f"{len(cluster.jobs)} jobs",
            round_trip_seconds=answer.round_trip_seconds,
            servers=len(cluster.servers),
        )
    if around.cluster.settings.ca_file is None:
        yield warned(
            "calls are plaintext, and everyone may make them",
            "turn on mTLS: --tls-ca, --tls-certificate and --tls-key (docs/security.md)",
        )


def check_clock(around: Surroundings) -> Iterable[CheckFinding]:
    """Does this clock agree with the control plane's?"""
    answer = _answer(around)
    if answer is not None and answer.cluster is not None:
        yield judge_clock(answer.asked_at - answer.cluster.unix_seconds)


def judge_clock(ahead_seconds: float) -> CheckFinding:
    """Judges how far this clock is ahead of the control plane's."""
    way = "ahead of" if ahead_seconds > 0 else "behind"
    says = f"{abs(ahead_seconds):.3g} s {way} the control plane's"
    advice = "run an NTP client (chrony, systemd-timesyncd) on both machines"
    if abs(ahead_seconds) > _CLOCK_FAIL_SECONDS:
        return failed(says, f"{advice}; certificates depend on it", seconds=ahead_seconds)
    if abs(ahead_seconds) > _CLOCK_WARN_SECONDS:
        return warned(says, advice, seconds=ahead_seconds)
    return passed(says, seconds=ahead_seconds)


def check_versions(around: Surroundings) -> Iterable[CheckFinding]:
    """Does everyone run the same distca?"""
    own = f"distca {__version__}, Python {platform.python_version()}, torch {_version('torch')}"
    answer = _answer(around)
    if answer is None or answer.cluster is None:
        yield passed(own, distca=__version__)
        return
    yield compare_versions(own, answer.cluster)


def compare_versions(own: str, cluster: cluster_pb2.DescribeClusterResponse) -> CheckFinding:
    """Compares this process's version with control plane and servers."""
    others = {f"the control plane ({cluster.version})"} - {f"the control plane ({__version__})"}
    others |= {
        f"{each.server.server_id} ({each.server.version})"
        for each in cluster.servers
        if each.server.version != __version__
    }
    if others:
        return warned(
            f"{own}; others run another distca: {', '.join(sorted(others))}",
            "run the same version everywhere; a job needs it on all of its ranks and servers",
            distca=__version__,
        )
    return passed(f"{own}; the same distca everywhere", distca=__version__)


def _answer(around: Surroundings) -> ClusterAnswer | None:
    return around.cluster.answer_or_none() if around.cluster else None


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
