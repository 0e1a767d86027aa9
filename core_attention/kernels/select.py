"""The kernel of a device: a registry of names, and the best choice if none is given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from core_attention.kernels.protocol import Kernel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelEntry:
    """A kernel that can be selected.

    Attributes:
        device_type: torch device type it runs on, ``"cpu"`` or ``"cuda"``.
        make: imports and makes the kernel for a device; raises ImportError if a package that it
            needs is missing, ValueError if the device is too old for it, LauncherError if this
            machine cannot launch kernels of Triton.
    """

    device_type: str
    make: Callable[[torch.device], Kernel]


def _make_cpu(device: torch.device) -> Kernel:
    from core_attention.kernels.cpu import CpuKernel

    return CpuKernel()


def _make_fa4(device: torch.device) -> Kernel:
    from core_attention.kernels.fa4 import Fa4Kernel

    return Fa4Kernel(device)


def _make_fa2(device: torch.device) -> Kernel:
    from core_attention.kernels.fa2 import Fa2Kernel

    return Fa2Kernel(device)


KERNELS: Mapping[str, KernelEntry] = MappingProxyType(
    {
        "cpu": KernelEntry("cpu", _make_cpu),
        "fa4": KernelEntry("cuda", _make_fa4),
        "fa2": KernelEntry("cuda", _make_fa2),
    }
)
"""The kernels by name, the preferred one of a device type first."""


def select_kernel(
    device: torch.device,
    name: str | None = None,
    kernels: Mapping[str, KernelEntry] = KERNELS,
) -> Kernel:
    """The kernel called ``name``, or the first of ``kernels`` that can run on ``device``.

    Raises:
        ValueError, LauncherError: no kernel runs here.
    """
    there = {n: entry for n, entry in kernels.items() if entry.device_type == device.type}
    if name is not None and name not in there:
        raise ValueError(
            f"kernel is {name!r}; valid on {device.type} are {sorted(there)} (all kernels: "
            f"{sorted(kernels)})"
        )
    reasons = []
    for candidate in there if name is None else [name]:
        try:
            kernel = there[candidate].make(device)
        except (ImportError, ValueError) as error:
            reasons.append(f"{candidate}: {error}")
        else:
            if reasons:
                logger.warning("kernel %s is used on %s; %s", candidate, device, "; ".join(reasons))
            return kernel
    raise ValueError(
        f"no kernel runs on device {str(device)!r}: "
        + ("; ".join(reasons) or f"this release has kernels for {_device_types(kernels)} only")
    )


def _device_types(kernels: Mapping[str, KernelEntry]) -> str:
    return ", ".join(sorted({entry.device_type for entry in kernels.values()}))
