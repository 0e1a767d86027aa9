"""The ranks of a run: their devices, their process group, and what they must agree on."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.apps.train.settings import DeviceName
from distca.errors import DistcaError


def number_of(variable: str, environ: Mapping[str, str], default: str = "") -> int:
    """A number that torchrun sets.

    Raises:
        DistcaError: it is missing, or no number.
    """
    text = environ.get(variable, default)
    if not text.isdecimal():
        raise DistcaError(
            f"environment variable {variable} is {text!r}; start trainers with torchrun, or all "
            "processes at once with distca local"
        )
    return int(text)


def choose_device(name: DeviceName, local_rank: int) -> torch.device:
    """The device of the trainer that is number ``local_rank`` on its host, made current.

    Raises:
        DistcaError: there is no such CUDA device.
    """
    n_devices = torch.cuda.device_count() if name is not DeviceName.CPU else 0
    if name is DeviceName.CPU or (name is DeviceName.AUTO and not n_devices):
        return torch.device("cpu")
    if local_rank >= n_devices:
        raise DistcaError(
            f"LOCAL_RANK {local_rank} asks for CUDA device {local_rank}, and there are "
            f"{n_devices}; start one trainer a GPU, or give --device cpu"
        )
    device = torch.device("cuda", local_rank)
    # Streams share few hardware queues by default, and what comes behind a receive of NCCL waits
    # for its sender: which waits, in turn, for a server whose stream may be in the same queue.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_group(init_method: str, timeout_seconds: float, device: torch.device) -> Iterator[None]:
    """Joins the group of all ranks, whose waits end after ``timeout_seconds``; leaves it at the
    end. Tensors on the CPU go over gloo, those on ``device``, if it is a GPU, over NCCL."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        device_id=device if on_gpu else None,
        init_method=init_method,
        rank=number_of("RANK", os.environ),
        world_size=number_of("WORLD_SIZE", os.environ),
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_agreement(what: Mapping[str, object]) -> None:
    """Checks that all ranks pass equal values.

    Raises:
        DistcaError: on every rank, naming the field and each rank's value.
    """
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(what))
    for name in what:
        values = [each.get(name) for each in everyone]
        if any(value != values[0] for value in values):
            raise DistcaError(
                f"ranks disagree on {name}: {values}, in order of ranks; start all of them with "
                "the same data and options"
            )


def sum_over_ranks(value: float) -> float:
    """The sum of ``value`` over all ranks, in float64."""
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
