"""The device of a trainer."""

from __future__ import annotations

import gc
import os
import sys

import torch

from data_plane.owner_thread import SWITCH_INTERVAL_SECONDS
from distca.apps.train.settings import DeviceName
from distca.errors import SettingsError


def choose_device(name: DeviceName, local_rank: int) -> torch.device:
    """The device of the trainer that is number ``local_rank`` on its host, made current. PyTorch's
    cache on it grows in place, see :func:`prefer_expandable_segments`, and its streams have queues
    of their own, see :func:`prefer_many_queues`.

    Raises:
        SettingsError: there is no such CUDA device.
    """
    n_devices = torch.cuda.device_count() if name is not DeviceName.CPU else 0
    if name is DeviceName.CPU or (name is DeviceName.AUTO and not n_devices):
        return torch.device("cpu")
    if local_rank >= n_devices:
        raise SettingsError(
            f"LOCAL_RANK {local_rank} asks for CUDA device {local_rank}, and there are "
            f"{n_devices}; start one trainer a GPU, or give --device cpu"
        )
    device = torch.device("cuda", local_rank)
    # First, since the allocator may read its settings when the device is made current.
    prefer_expandable_segments()
    prefer_many_queues()
    torch.cuda.set_device(device)
    return device


def prepare_process(device: torch.device) -> None:
    """On a GPU, the training loop must launch in time: its threads take turns quickly, and garbage
    is collected between steps only (:func:`collect_garbage`)."""
    if device.type == "cuda":
        sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
        gc.disable()


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def prefer_expandable_segments() -> None:
    """Has PyTorch's cache grow in place, unless the environment says how it is to be.

    Two nano-batches free blocks of more sizes than one, which its usual cache cannot join.
    PyTorch reads the setting at its first allocation on a GPU.
    """
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def prefer_many_queues() -> None:
    """Has CUDA make as many hardware queues as it can, unless the environment says how many.

    Streams share 8 of them by default, and what comes behind a receive of NCCL waits for its
    sender: which waits, in turn, for a server whose stream may be in the same queue. CUDA reads the
    setting when the device is made current.
    """
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def keep_what_is_built(device: torch.device) -> None:
    """Before the first step: what there is will stay, so collections need not look at it again."""
    if device.type == "cuda":
        gc.collect()
        gc.freeze()


def collect_garbage(device: torch.device) -> None:
    """Between two steps, what :func:`prepare_process` keeps from happening within them."""
    if device.type == "cuda":
        gc.collect()
