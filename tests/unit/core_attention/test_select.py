"""Selecting a kernel by device and name."""

from __future__ import annotations

import pytest
import torch

from core_attention.kernels.cpu import CpuKernel
from core_attention.kernels.protocol import Kernel
from core_attention.kernels.select import KernelEntry, select_kernel

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


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"'nope'.*\['cpu'\]"):
        select_kernel(CPU, "nope")
    with pytest.raises(ValueError, match=r"\['quick', 'steady'\]"):
        select_kernel(CUDA, "cpu", REGISTRY)


def test_the_first_that_can_be_made_is_taken() -> None:
    assert isinstance(select_kernel(CUDA, kernels=REGISTRY), CpuKernel)


def test_a_kernel_asked_for_by_name_is_not_replaced() -> None:
    with pytest.raises(ValueError, match="pip install quick"):
        select_kernel(CUDA, "quick", REGISTRY)


def test_a_device_without_kernels_is_named() -> None:
    only_cpu = {"cpu": REGISTRY["cpu"]}
    with pytest.raises(ValueError, match="'cuda:0'"):
        select_kernel(CUDA, kernels=only_cpu)
