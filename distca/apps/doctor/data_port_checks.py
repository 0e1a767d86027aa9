"""A check that strangers do not reach the data plane, for a machine outside of all jobs."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from data_plane.interfaces import ipv4_of
from data_plane.transport import Address
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.surroundings import Surroundings
from distca.contract.addresses import split_address

_ANSWER_SECONDS = 1.0
"""A firewall that drops lets every attempt take as long."""

_AT_ONCE = 128
_MEANING = (
    "whoever reaches a data port can end the process behind it: admit members alone by the chart's "
    "networkPolicy with a CNI that enforces it, a security group or a firewall; or encrypt the "
    "data network (docs/security.md)"
)


def check_data_ports(around: Surroundings) -> Iterable[CheckFinding]:
    """Does a data port of a node or trainer answer here, where none should?"""
    settings = around.settings
    answer = around.cluster.answer_or_none() if around.cluster and settings.pool else None
    told = (
        [Address(*split_address("address", text)) for text in answer.addresses.values()]
        if answer
        else []
    )
    listeners = [*settings.peers, *told]
    if not listeners:
        yield failed(
            "data-ports",
            "no data port is known: the control plane is not asked, or tells this role none",
            "give --peer HOST:PORT of a node or trainer, or --control-plane and an operator's "
            "certificate",
        )
        return
    for host in sorted({each.host for each in listeners}):
        ports = {each.port for each in listeners if each.host == host} | set(settings.ucx_ports)
        yield judge_host(host, sorted(ports))


def judge_host(host: str, ports: Sequence[int]) -> CheckFinding:
    """Connects to each port and sends nothing, which harms no server.

    Args:
        host: where members exchange rows.
        ports: of their listeners and of UCX.
    """
    try:
        ip = ipv4_of(host)
    except OSError as error:
        return failed(
            "data-ports",
            f"{host} does not resolve: {error.strerror or error}",
            "give --peer a name that resolves here",
        )
    if ipaddress.ip_address(ip).is_loopback:
        return passed("data-ports", f"{host} is loopback: no other machine reaches it")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        answered = list(pool.map(lambda port: _answers(Address(ip, port)), ports))
    found = [port for port, answers in zip(ports, answered, strict=True) if answers]
    if not found:
        return passed("data-ports", f"{host}: none of {len(ports)} ports answers here")
    shown = ", ".join(str(port) for port in found)
    return warned("data-ports", f"{host}: port {shown} answers here", _MEANING, answering=shown)


def _answers(address: Address) -> bool:
    try:
        socket.create_connection((address.host, address.port), _ANSWER_SECONDS).close()
    except OSError:
        return False
    return True
