"""Selecting a kernel by device and name."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import Kernel
from core_attention.kernels.select import KERNELS, KernelEntry, select_kernel
from tests.support.errors import refused

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def missing(device: torch.device) -> Kernel:
    raise ImportError("no module named quick; pip install quick")


def works(device: torch.device) -> Kernel:
    return CpuKernel()


REGISTRY = {
    "quick": KernelEntry("cuda", missing),
    "steady": KernelEntry("cuda", works),
    "cpu": KernelEntry("cpu", works),
}


def test_the_first_that_can_be_made_is_taken() -> None:
    assert isinstance(select_kernel(CUDA, kernels=REGISTRY), CpuKernel)


@pytest.mark.parametrize(
    ("device", "name", "kernels"),
    [
        (CPU, "nope", KERNELS),
        (CUDA, "cpu", REGISTRY),
        # It is not replaced by another one.
        (CUDA, "quick", REGISTRY),
        (CUDA, None, {"cpu": REGISTRY["cpu"]}),
    ],
)
def test_a_kernel_that_is_not_there_is_refused(
    device: torch.device, name: str | None, kernels: Mapping[str, KernelEntry]
) -> None:
    with refused():
        select_kernel(device, name, kernels)
