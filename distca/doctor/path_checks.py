"""What the network achieves: on this machine, and on the way to peers."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from core_attention.shape import AttentionShape
from data_plane.interfaces import addresses_of
from data_plane.transport import (
    Address,
    HandshakeRejected,
    ProbeResult,
    TransportError,
    TransportName,
)
from distca.contract.addresses import split_address
from distca.contract.rpc_errors import RpcError
from distca.doctor.finding import Finding, failed, passed, warned
from distca.doctor.measurement import (
    ChildFailed,
    answers_as_nixl,
    child_responder,
    measure,
    measure_retrying,
    transport_of,
)
from distca.doctor.pool_job import PoolJob, pool_job
from distca.doctor.responder import HELLO, OPEN_SECRET, ResponderSettings
from distca.doctor.surroundings import Surroundings

_ANY_SHAPE = AttentionShape(
    num_heads=1, num_heads_kv=1, head_dim=64, head_dim_v=64, dtype="float32"
)
"""A job needs one; nothing is computed."""

_SLOW = "see which network UCX chose: UCX_TLS, UCX_NET_DEVICES, and what the other checks say"


def self_tests(around: Surroundings) -> Iterable[Finding]:
    """How fast is UCX between two processes of this machine?"""
    yield from _self_test(around, one_host=False)
    yield from _self_test(around, one_host=True)


def _self_test(around: Surroundings, *, one_host: bool) -> Iterator[Finding]:
    settings = around.settings
    peer = ResponderSettings(
        host=settings.rows_host,
        device=settings.device,
        transport=around.transport.name,
        one_host=one_host,
    )
    what = "shared memory" if one_host else "the network"
    try:
        with (
            child_responder(peer) as address,
            transport_of(around.transport, settings.device, one_host=one_host) as transport,
        ):
            result = measure(transport, settings.device, address, HELLO, settings.probe_seconds)
    except (TransportError, ChildFailed, RuntimeError, ValueError) as error:
        yield failed("ucx", f"over {what} of this machine: {error}", _SLOW)
        return
    yield judge_self_test(
        result, one_host=one_host, floor_gigabytes_per_second=settings.min_gigabytes_per_second
    )


def judge_self_test(
    result: ProbeResult, *, one_host: bool, floor_gigabytes_per_second: float
) -> Finding:
    """Whether what UCX chose on this machine is what it should choose, where the library tells."""
    fast = {"posix", "sysv", "cma", "cuda_ipc", "cuda_copy"}
    told = result.transport == TransportName.UCXX
    if one_host and told and not fast & set(result.lanes.split(",")):
        return warned(
            "ucx",
            f"within this machine: {_shown(result)}; shared memory is not used",
            "leave UCX_TLS unset, or add posix to it; see what check namespaces says",
            **_figures(result),
        )
    where = "within this machine" if one_host else "by the network, to this machine itself"
    return judge_rate("ucx", where, result, floor_gigabytes_per_second)


def ways_to_peers(around: Surroundings) -> Iterable[Finding]:
    """How fast is the way to the peers that were given, and to the pool's servers?"""
    settings = around.settings
    servers = around.cluster.answer_or_none() if around.cluster and settings.pool else None
    addresses = servers.addresses if servers else {}
    if not settings.peers and not addresses:
        return
    with ExitStack() as stack:
        try:
            transport = stack.enter_context(
                transport_of(around.transport, settings.device, one_host=settings.one_host)
            )
            job = None
            if addresses and around.cluster is not None:
                shape = settings.shapes[0] if settings.shapes else _ANY_SHAPE
                job = stack.enter_context(
                    pool_job(around.cluster.settings, shape, around.transport.name)
                )
        except (RpcError, RuntimeError, ValueError) as error:
            yield failed("peers", str(error), "mend what check ucx and control-plane say first")
            return

        def rate(address: Address, hello: bytes, secret: bytes = OPEN_SECRET) -> ProbeResult:
            return measure_retrying(
                transport, settings.device, address, hello, settings.probe_seconds, secret=secret
            )

        floor = settings.min_gigabytes_per_second
        for peer in settings.peers:
            yield from _judge_peer(peer, lambda address: rate(address, HELLO), floor)
        for server_id, text in addresses.items():
            yield _judge_server(server_id, text, job, rate, floor)


def _judge_peer(
    peer: Address, rate: Callable[[Address], ProbeResult], floor: float
) -> Iterator[Finding]:
    """Each address that the peer's name stands for, such as a headless Service's pods."""
    try:
        found = addresses_of(peer.host, socket.AF_INET)
    except OSError as error:
        yield failed(
            "peers",
            f"{peer} does not resolve: {error.strerror or error}",
            "give --peer HOST:PORT of a machine where 'distca doctor --listen' or a server runs",
        )
        return
    for ip in found:
        address = Address(ip, peer.port)
        name = str(peer) if ip == peer.host else f"{peer} ({ip})"
        try:
            yield judge_rate("peers", name, rate(address), floor)
        except HandshakeRejected:
            yield _reached(name)
        except TransportError as error:
            yield _other_transport(name, address, error) or _unreachable(name, error)


def _judge_server(
    server_id: str,
    text: str,
    job: PoolJob | None,
    rate: Callable[[Address, bytes, bytes], ProbeResult],
    floor: float,
) -> Finding:
    address = Address(*split_address("data_address", text))
    name = f"server {server_id} at {text}"
    try:
        hello, secret = (job.hello(server_id), job.token) if job else (HELLO, OPEN_SECRET)
        result = rate(address, hello, secret)
    except HandshakeRejected as error:
        if job is None:
            return _reached(name)
        return failed("peers", f"{name}: {error}", "see the server's log")
    except TransportError as error:
        return _unreachable(name, error)
    return judge_rate("peers", name, result, floor)


def _reached(name: str) -> Finding:
    return passed(
        "peers",
        f"{name}: a server, reached; it answers jobs alone, so its speed is not measured",
    )


def _other_transport(name: str, peer: Address, error: TransportError) -> Finding | None:
    """That the peer uses another transport, if that is so."""
    if error.transport == TransportName.NIXL or not answers_as_nixl(peer):
        return None
    return failed(
        "peers",
        f"{name}: the peer uses the transport nixl, this doctor {error.transport}",
        "give all processes the same --transport",
    )


def _unreachable(name: str, error: TransportError) -> Finding:
    return failed(
        "peers",
        f"{name}: {error}",
        "see that it uses the same --transport; look for a firewall or NetworkPolicy: UCX needs "
        "the data port and the ports of UCX_TCP_PORT_RANGE, in both directions",
    )


def judge_rate(check: str, where: str, result: ProbeResult, floor: float) -> Finding:
    """Whether a way is as fast as is asked for: ``floor``, in GB/s."""
    says = f"{where}: {_shown(result)}"
    if result.gigabytes_per_second < floor:
        return failed(check, f"{says}, asked for are {floor:g}", _SLOW, **_figures(result))
    return passed(check, says, **_figures(result))


def _shown(result: ProbeResult) -> str:
    microseconds = result.round_trip_seconds * 1e6
    return (
        f"{result.gigabytes_per_second:.3g} GB/s over {result.lanes or 'unknown lanes'}, round "
        f"trip {microseconds:.0f} us"
    )


def _figures(result: ProbeResult) -> dict[str, float | int | str]:
    return {
        "peer": result.peer,
        "lanes": result.lanes,
        "gigabytes_per_second": result.gigabytes_per_second,
        "round_trip_seconds": result.round_trip_seconds,
    }
