"""All checks, in the order in which their findings help."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from distca.apps.doctor.cluster_checks import (
    check_clock,
    check_control_plane,
    check_dns,
    check_versions,
)
from distca.apps.doctor.device_checks import check_gpu, check_kernels
from distca.apps.doctor.finding import CheckFinding, failed
from distca.apps.doctor.machine_checks import (
    check_gpudirect,
    check_namespaces,
    check_rdma,
    check_shared_memory,
)
from distca.apps.doctor.surroundings import Surroundings
from distca.apps.doctor.transport_checks import check_transport, check_ucx

logger = logging.getLogger(__name__)

Check = Callable[[Surroundings], Iterable[CheckFinding]]

CHECKS: Mapping[str, Check] = {
    "gpu": check_gpu,
    "kernels": check_kernels,
    "shared-memory": check_shared_memory,
    "namespaces": check_namespaces,
    "rdma": check_rdma,
    "gpudirect": check_gpudirect,
    "dns": check_dns,
    "control-plane": check_control_plane,
    "clock": check_clock,
    "versions": check_versions,
    "transport": check_transport,
    "ucx": check_ucx,
}
"""All checks in the order of the report. One says nothing where it does not apply."""

PER_DEVICE = ("gpu", "kernels")
"""Checks of each device that is named; the others are of the machine."""


def examine(around: Surroundings, checks: Mapping[str, Check] = CHECKS) -> Iterator[CheckFinding]:
    """The findings, as they come. A check that breaks is a finding too, and the others go on."""
    for name, check in checks.items():
        if name in around.settings.skip:
            continue
        if name not in PER_DEVICE or not around.settings.also_devices:
            yield from _guarded(name, check, around)
            continue
        for device in (around.settings.device, *around.settings.also_devices):
            there = replace(around, settings=replace(around.settings, device=device))
            for finding in _guarded(name, check, there):
                yield replace(finding, says=f"{device}: {finding.says}")


def _guarded(name: str, check: Check, around: Surroundings) -> Iterator[CheckFinding]:
    try:
        for finding in check(around):
            yield replace(finding, check=name)
    except Exception as error:
        logger.debug("check %s broke", name, exc_info=True)
        broke = failed(
            f"the check itself broke: {type(error).__name__}: {error}",
            "report it with the output of distca --log-level debug doctor; --skip leaves it out",
        )
        yield replace(broke, check=name)
