"""The transport, its library, and whether it works between two processes of this machine."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from contextlib import closing

from data_plane.nixl.agent import import_nixl
from data_plane.transport import (
    Address,
    ProbeResult,
    Transport,
    TransportError,
    TransportName,
)
from data_plane.transport_choice import TransportChoice
from data_plane.transports import open_transport
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.responder import (
    HELLO,
    OPEN_SECRET,
    ResponderSettings,
    child_responder,
)
from distca.apps.doctor.surroundings import Surroundings

_PROBE_BYTES = {"cpu": 8 * 2**20, "cuda": 64 * 2**20}
"""Large enough for full speed, see docs/benchmarks.md."""

_REPEATS = 12
_SLOW = "see which network UCX chose: UCX_TLS, UCX_NET_DEVICES, and what the other checks say"


def check_transport(around: Surroundings) -> Iterable[CheckFinding]:
    """Is there a transport, and do the servers of the pool use it too?"""
    try:
        choice = around.transport
    except ImportError as error:
        yield failed(str(error), "install it, on every machine of the job")
        return
    yield judge_transport(choice, around.pool_transports)


def judge_transport(choice: TransportChoice, pool: frozenset[TransportName]) -> CheckFinding:
    """Judges whether a choice fits the pool's servers."""
    says = f"{choice.name}: {choice.reason}"
    if pool and choice.name not in pool:
        theirs = " and ".join(sorted(pool))
        return failed(
            f"{says}, but the servers of the pool use {theirs}",
            f"give all processes of a job the same: --transport={theirs}, or auto",
        )
    if len(pool) > 1:
        return warned(
            f"{says}; the servers of the pool use {' and '.join(sorted(pool))}",
            f"give all attention nodes the same: others are no use to a job on {choice.name}",
        )
    return passed(says)


def check_ucx(around: Surroundings) -> Iterable[CheckFinding]:
    """Is the library there, and does it work between two processes of this machine?"""
    try:
        name = around.transport.name
    except ImportError:
        yield failed("there is no transport to try", "mend what check transport says first")
        return
    try:
        version = _ucx_version() if name is TransportName.UCXX else _nixl_version()
    except (ImportError, OSError):
        library = name.partition(":")[0]
        yield failed(
            f"{library} cannot be imported",
            f"install extra {library}-cu12 or {library}-cu13 (distca[{library}-cu13]); both work "
            "without a GPU",
        )
        return
    yield passed(version)
    for one_host in (False, True):
        yield _self_test(around, one_host=one_host)


def _self_test(around: Surroundings, *, one_host: bool) -> CheckFinding:
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
            closing(
                open_transport(around.transport, device=settings.device, one_host=one_host)
            ) as transport,
        ):
            result = measure(transport, settings.device, address, settings.probe_seconds)
    except (TransportError, RuntimeError, ValueError) as error:
        return failed(f"over {what} of this machine: {error}", _SLOW)
    return judge_self_test(result, one_host=one_host, floor=settings.min_gigabytes_per_second)


def measure(
    transport: Transport, device: str, address: Address, timeout_seconds: float
) -> ProbeResult:
    """Measures one connection to a doctor's responder, with buffers on ``device``."""
    connection, _ = transport.connect(address, HELLO, timeout_seconds, secret=OPEN_SECRET)
    try:
        nbytes = _PROBE_BYTES[device.partition(":")[0]]
        return transport.probe(connection, nbytes, _REPEATS, timeout_seconds)
    finally:
        connection.close("measured")


def judge_self_test(result: ProbeResult, *, one_host: bool, floor: float) -> CheckFinding:
    """Judges UCX's choice on this machine, where the library reports it, and its speed against
    ``floor``, in GB/s."""
    fast = {"posix", "sysv", "cma", "cuda_ipc", "cuda_copy"}
    says = (
        f"{'within this machine' if one_host else 'by the network, to this machine itself'}: "
        f"{result.gigabytes_per_second:.3g} GB/s over {result.lanes or 'unknown lanes'}, round "
        f"trip {result.round_trip_seconds * 1e6:.0f} us"
    )
    figures: dict[str, float | int | str] = {
        "lanes": result.lanes,
        "gigabytes_per_second": result.gigabytes_per_second,
        "round_trip_seconds": result.round_trip_seconds,
    }
    told = result.transport == TransportName.UCXX
    if one_host and told and not fast & set(result.lanes.split(",")):
        return warned(
            f"{says}; shared memory is not used",
            "leave UCX_TLS unset, or add posix to it; see what check namespaces says",
            **figures,
        )
    if result.gigabytes_per_second < floor:
        return failed(f"{says}, asked for are {floor:g}", _SLOW, **figures)
    return passed(says, **figures)


def _ucx_version() -> str:
    """Versions of ucxx and of the UCX that it has loaded."""
    import ucxx

    version = ".".join(str(part) for part in ucxx.get_ucx_version())
    return f"ucxx {ucxx.__version__}, UCX {version}"


def _nixl_version() -> str:
    """The version of nixl, which brings a UCX of its own."""
    # The package is named for its version of CUDA: nixl-cu13.
    name = str(import_nixl().__name__).replace("_", "-")
    return f"{name} {importlib.metadata.version(name)}"
