"""How fast each NIC is with the memory of each GPU, or of the host.

UCX takes the devices it may use from the environment, once in a process. So each measurement is
made by a process of its own, to which one NIC alone is left and no shorter way: neither shared
memory nor ``cuda_ipc``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from data_plane.interfaces import interface_of_host
from data_plane.transport import ProbeResult
from data_plane.transport_choice import obstacles
from distca.doctor.finding import Finding, failed, passed
from distca.doctor.measurement import LOG_OF_UCX, child_responder, measure, transport_of
from distca.doctor.path_checks import judge_rate
from distca.doctor.pci_topology import PciDevice, gpus, nearest, nics
from distca.doctor.responder import HELLO, ResponderSettings
from distca.doctor.surroundings import Surroundings

_STARTS_SECONDS = 120.0
"""Two processes that import PyTorch, on a machine that may be busy."""


def check_nic_rates(around: Surroundings) -> Iterable[Finding]:
    """What does each NIC achieve, there and back within this machine?"""
    ports = [port for port in around.facts.wanted_ports if port.opens]
    if not around.facts.ports:
        yield _over_tcp(around)
        return
    if not ports or obstacles(around.facts, around.transport.name):
        return  # check rdma says what is wrong
    shown = {port.name: str(port) for port in ports}
    devices = nics(sorted({port.device for port in ports}), around.root)
    for device in (around.settings.device, *around.settings.also_devices):
        near = _near(device, devices, around) or {port.device for port in ports}
        for name in (port.name for port in ports if port.device in near):
            yield _judge(around, device, shown[name], _ways(name, device, rdma=True))


def _over_tcp(around: Surroundings) -> Finding:
    """Without RDMA: by the interface of the address at which rows are exchanged."""
    settings = around.settings
    try:
        name = interface_of_host(settings.rows_host)
    except ValueError as error:
        return failed("nic-rates", f"no RDMA device; {error}", "give --data-host or -interface")
    if name is None:
        return passed("nic-rates", "no RDMA device, and no one interface for TCP")
    where = f"no RDMA device; {name} by TCP"
    return _judge(around, settings.device, where, _ways(name, settings.device, rdma=False))


def _ways(net_device: str, device: str, *, rdma: bool) -> dict[str, str]:
    """The variables that leave UCX one NIC, and copies between the GPU and the host."""
    transports = ["rc" if rdma else "tcp", *(["cuda_copy"] if device != "cpu" else [])]
    return {"UCX_NET_DEVICES": net_device, "UCX_TLS": ",".join(transports)}


def _near(device: str, devices: tuple[PciDevice, ...], around: Surroundings) -> set[str]:
    """Names of the NICs nearest to a GPU, by which UCX goes too; empty if that is not known."""
    if device == "cpu" or not devices:
        return set()
    address = _pci_address(int(device.partition(":")[2]))
    found = [gpu for gpu in gpus(around.root) if gpu.name == address]
    return set(nearest(found[0], devices)[1]) if found else set()


def _pci_address(index: int) -> str:
    import torch

    # PyTorch's types do not know its PCI address.
    properties: Any = torch.cuda.get_device_properties(index)
    return (
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        f"{properties.pci_device_id:02x}.0"
    )


def _judge(around: Surroundings, device: str, where: str, ways: dict[str, str]) -> Finding:
    settings = around.settings
    peer = ResponderSettings(
        host=settings.rows_host, device=device, transport=around.transport.name
    )
    says = f"{where}, {device}"
    try:
        result = _measure_apart(peer, settings.probe_seconds, ways)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        advice = "see what the other checks say; --skip=nic-rates leaves this one out"
        return failed("nic-rates", f"{says}: {error}", advice)
    return judge_rate("nic-rates", says, result, settings.min_gigabytes_per_second)


def _measure_apart(
    peer: ResponderSettings, probe_seconds: float, ways: dict[str, str]
) -> ProbeResult:
    """What two processes achieve between them to which ``ways`` are left.

    Raises:
        RuntimeError: with the last line that the first of them wrote.
        subprocess.TimeoutExpired: it did not end.
    """
    done = subprocess.run(
        [sys.executable, "-m", __name__, json.dumps(asdict(peer)), str(probe_seconds)],
        env=os.environ | LOG_OF_UCX | ways,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_STARTS_SECONDS + probe_seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}"
        )
    return ProbeResult(**json.loads(done.stdout))


def main() -> None:
    """The process of one measurement: settings of its peer as JSON and the seconds that it may take
    as arguments, the result as JSON on stdout."""
    peer, seconds = ResponderSettings(**json.loads(sys.argv[1])), float(sys.argv[2])
    with (
        child_responder(peer) as address,
        transport_of(peer.transport, peer.device, one_host=False) as transport,
    ):
        result = measure(transport, peer.device, address, HELLO, seconds)
    sys.stdout.write(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
