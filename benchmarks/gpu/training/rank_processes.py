"""The processes of a benchmark's ranks: one on each GPU of this host."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessContext, spawn

from data_plane.owner_thread import SWITCH_INTERVAL_SECONDS

GROUP_SECONDS = 300.0


@contextmanager
def spawned(
    run: Callable[..., None], args: tuple[Any, ...], n_ranks: int
) -> Iterator[ProcessContext]:
    """Processes that call ``run(rank, *args)``; those that are left at the end are killed."""
    ranks = spawn(run, args, nprocs=n_ranks, join=False)
    assert ranks is not None
    try:
        yield ranks
    finally:
        # One that an interrupt found in a callback of the library's has not heard of it.
        for process in ranks.processes:
            process.kill()
            process.join()


def launch_in_time(rank: int) -> None:
    """Prepares a rank's process for steps that are timed."""
    logging.basicConfig(level=logging.WARNING, format=f"[{rank}] %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    # Collections in the middle of a step would stop its launches; there is one between steps.
    gc.disable()


@contextmanager
def joined(rank: int, n_ranks: int, *, on_gpu: bool, rendezvous: Path) -> Iterator[torch.device]:
    """A rank's device, made current, and in the block the default process group. What goes wrong
    there is printed, and ends the process.

    Args:
        rank, n_ranks: of the group.
        on_gpu: the rank's GPU is used, and NCCL for its tensors.
        rendezvous: a file that does not exist, the same for all.
    """
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        # Two nano-batches free blocks of sizes that PyTorch's usual cache cannot join.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=n_ranks,
        timeout=timedelta(seconds=GROUP_SECONDS),
        device_id=device if on_gpu else None,
    )
    try:
        yield device
        dist.destroy_process_group()
    except BaseException:
        # A rank that is torn down while others wait for it would only hide the reason.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def let_go(device: torch.device) -> None:
    """Between two ways: what the one before held is freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
