"""Processes of tests that run a function of a module, for ranks.

A new process imports torch and much more before it comes to its function: three to eight seconds of
a core. A fork of multiprocessing's server, which has imported it once for all of them, does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

from torch.multiprocessing.spawn import start_processes

from tests.support.preloaded import has_gpu

_PRELOADED = (
    "data_plane.ucxx.transport",
    "tests.support.team",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental._attention",
    "trainer_client.loops.fsdp",
    "trainer_client.models.transformers",
)
"""No module of tests that asks for CUDA devices: a fork could not use them afterwards."""


@functools.cache
def forkserver() -> ForkServerContext | SpawnContext:
    """The context whose processes are forks; on a machine with a GPU they are new, as libraries may
    ask for CUDA when they are imported."""
    if has_gpu():
        return get_context("spawn")
    context = get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))
    return context


def run_forked(function: Callable[..., None], arguments: tuple[Any, ...], n_ranks: int) -> None:
    """Calls ``function(rank, *arguments)`` in a process for each rank, and waits for all of them.
    Raises what :func:`torch.multiprocessing.spawn` does."""
    method = forkserver().get_start_method()
    start_processes(function, arguments, n_ranks, start_method=method)
