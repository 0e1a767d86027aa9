"""Ranks meet on the host before their first step, where a collective could keep them apart.

A collective occupies a GPU until the last rank has launched its own. Meanwhile CUDA may keep this
process's server from taking in a rank that connects, and that rank comes to no collective before it
has connected. So on GPUs no rank goes on before all have connected to their servers. The store of
``torch.distributed`` is there wherever collectives are, and needs no group and no device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.distributed_c10d import _get_default_store

logger = logging.getLogger(__name__)

_CHECK_SECONDS = 0.01


def collective_store(n_ranks: int) -> Store | None:
    """What processes of ``torch.distributed`` share; None if there is none, or if they are others
    than a job's ``n_ranks``."""
    if not dist.is_initialized() or dist.get_world_size() != n_ranks:
        return None
    return _get_default_store()


def meet(
    store: Store,
    job_id: str,
    n_ranks: int,
    *,
    timeout_seconds: float,
    check: Callable[[], None],
) -> bool:
    """Says that this rank has connected, and waits until all have; returns whether they did.

    Args:
        store: of all ranks.
        job_id: of the job; a rank comes here once in it.
        n_ranks: ranks of the job.
        timeout_seconds: after which it goes on alone, with a warning.
        check: raises what ended the job, if something did.
    """
    key, deadline = f"distca/{job_id}/connected", time.monotonic() + timeout_seconds
    there = store.add(key, 1)
    while there < n_ranks:
        check()
        if time.monotonic() > deadline:
            logger.warning(
                "%d of %d ranks have begun their first step after %.0f s; a collective that is "
                "launched now may keep the others from connecting",
                there,
                n_ranks,
                timeout_seconds,
            )
            return False
        time.sleep(_CHECK_SECONDS)
        there = store.add(key, 0)
    return True
