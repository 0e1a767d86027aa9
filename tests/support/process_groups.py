"""Process groups of torch.distributed, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist


@contextmanager
def process_group(folder: Path | str, rank: int = 0, n_ranks: int = 1) -> Iterator[None]:
    """The default group in the block, over gloo; its ranks meet in ``folder``, and at the end."""
    if n_ranks > 1:
        torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n_ranks
    )
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()
