"""GPU and kernels."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable

import torch

from attention_node.rehearsal import rehearse
from core_attention.host_compiler import Trouble
from core_attention.kernels.launcher import LauncherError
from core_attention.kernels.protocol import Kernel
from core_attention.kernels.select import select_kernel
from core_attention.shape import AttentionShape, format_shape
from data_plane.device_memory import Driver
from distca.apps.doctor.finding import CheckFinding, failed, passed, warned
from distca.apps.doctor.surroundings import Surroundings
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

_FREE_SHARE = 0.9
"""Less free memory than this share means that another process uses the GPU."""

_FIRST_WITH_FA4 = (9, 0)

_REHEARSAL_SECONDS = default_seconds("rehearsal_seconds")
"""A limit for all kernels of one shape; compiling them takes up to a minute."""

_USUAL_SHAPE = AttentionShape(
    num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16"
)
"""Launched where no shape was asked for."""


def check_gpu(around: Surroundings) -> Iterable[CheckFinding]:
    """Is the device there, and free?"""
    settings = around.settings
    if not settings.on_gpu:
        yield passed(f"none asked for; {torch.get_num_threads()} threads on the CPU")
        return
    if torch.version.cuda is None:
        yield failed(
            f"device is {settings.device} and this PyTorch ({torch.__version__}) has no CUDA",
            "install a CUDA build of PyTorch, or use the image built with VARIANT=cuda",
        )
        return
    if not torch.cuda.is_available():
        yield _no_gpu(driver_there=(around.root / "dev/nvidiactl").exists())
        return
    count, index = torch.cuda.device_count(), int(settings.device.partition(":")[2])
    if index >= count:
        yield failed(
            f"device is {settings.device} and the number of GPUs is {count}",
            "choose cuda:0" + (f" to cuda:{count - 1}" if count > 1 else ""),
        )
        return
    yield _describe_gpu(index)
    yield judge_fabric(Driver.of(index).fabric_obstacle)


def judge_fabric(obstacle: str) -> CheckFinding:
    """Shows how far NVLink carries buffers; ``obstacle`` is that of ``Driver``."""
    if obstacle:
        return passed(f"buffers have no fabric handle, NVLink ends at this host: {obstacle}")
    return passed("buffers have fabric handles, for NVLink to other hosts of its domain")


def _no_gpu(*, driver_there: bool) -> CheckFinding:
    if driver_there:
        says = "PyTorch finds no GPU, though there is /dev/nvidiactl"
        return failed(says, "check the driver with nvidia-smi")
    return failed(
        "PyTorch finds no GPU, and there is no /dev/nvidiactl",
        "install the driver; in Docker give --gpus, in a pod request nvidia.com/gpu",
    )


def _describe_gpu(index: int) -> CheckFinding:
    properties = torch.cuda.get_device_properties(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    says = (
        f"{properties.name}, {total_bytes / 2**30:.0f} GiB, compute capability "
        f"{properties.major}.{properties.minor}"
    )
    if free_bytes < _FREE_SHARE * total_bytes:
        return warned(
            f"{says}; only {free_bytes / 2**30:.0f} GiB are free",
            "another process uses this GPU: end it, or choose another",
            free_bytes=free_bytes,
            total_bytes=total_bytes,
        )
    return passed(says, free_bytes=free_bytes, total_bytes=total_bytes)


def check_kernels(around: Surroundings) -> Iterable[CheckFinding]:
    """Does a kernel run here, take the shapes, and do all launches of serving work?"""
    settings = around.settings
    device = torch.device(settings.device)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        yield failed(f"no {device} to run on", "mend what check gpu says first")
        return
    try:
        kernel = select_kernel(device)
        for shape in settings.shapes:
            kernel.check(shape, shape.rule)
    except ValueError as error:
        yield failed(str(error), "choose another shape or device, or install what is missing")
        return
    except LauncherError as error:
        yield failed(error.cause, error.advice)
        return
    for shape in settings.shapes or (_USUAL_SHAPE,):
        trouble = rehearsal_trouble(kernel, shape, device)
        if trouble is not None:
            yield failed(trouble.cause, trouble.advice, kernel=kernel.name)
            return
    shapes = ", ".join(format_shape(shape) for shape in settings.shapes)
    yield judge_kernel(kernel.name, _capability(device), shapes)


def rehearsal_trouble(
    kernel: Kernel,
    shape: AttentionShape,
    device: torch.device,
    *,
    seconds: float = _REHEARSAL_SECONDS,
) -> Trouble | None:
    """Finds what keeps ``kernel`` from serving ``shape``, by a server's own rehearsal.

    Args:
        kernel: runs the rehearsal.
        shape: of the rehearsal's rows.
        device: of the kernel.
        seconds: how long it may take.
    """
    raised: list[Exception] = []

    def run() -> None:
        try:
            kernel.warm_up(shape, shape.rule)
            rehearse(kernel, shape, device)
        except Exception as error:
            logger.debug("the rehearsal failed", exc_info=True)
            raised.append(error)

    what = f"{kernel.name} with {format_shape(shape)}"
    thread = threading.Thread(target=run, name="distca-doctor-rehearsal", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        return Trouble(
            f"{what} does not end within {seconds:g} s on {device}",
            "see what holds the device with nvidia-smi; a GPU that hangs needs a reset",
        )
    if not raised:
        return None
    if isinstance(raised[0], LauncherError):
        return Trouble(raised[0].cause, raised[0].advice)
    return Trouble(
        f"{what} fails on {device}: {type(raised[0]).__name__}: {raised[0]}",
        "see what the other checks say, and the traceback of distca --log-level debug doctor",
    )


def judge_kernel(name: str, capability: tuple[int, int] | None, shapes: str) -> CheckFinding:
    """Is it the fastest that there is for the GPU? ``capability`` is None on the CPU."""
    says = f"{name} runs {shapes}" if shapes else f"{name}; no shape was asked for"
    if capability is not None and capability >= _FIRST_WITH_FA4 and name != "fa4":
        return warned(
            f"{says}; FlashAttention-4 would be about twice as fast here",
            "install extra fa4 (distca[fa4])",
            kernel=name,
        )
    return passed(says, kernel=name)


def _capability(device: torch.device) -> tuple[int, int] | None:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None
