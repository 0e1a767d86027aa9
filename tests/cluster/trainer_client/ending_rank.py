"""A rank whose script ends in one of several ways after a few steps; see :mod:`test_endings`.

``python -m tests.cluster.trainer_client.ending_rank ENDING``, as a process that nothing restarts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import nn

import distca
from core_attention.shape import AttentionShape

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=16, head_dim_v=16, dtype="float32")
STEPS, LONG = 3, 4000
"""Of rank 1, and of one whose job is to be ended."""


class Model(nn.Module):
    """A layer of attention that is one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, (SHAPE.num_heads + 2 * SHAPE.num_heads_kv) * SHAPE.head_dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, SHAPE.head_dim))
        q, k, v = heads.split((4, 2, 2), dim=-2)
        return distca.flash_attn_func(q, k, v, causal=True)


def train(ending: str) -> None:
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=os.environ["STORE"], rank=rank, world_size=2)
    model = Model()
    distca.attach(model, data_host="127.0.0.1", one_host=True, probe_bytes=0)
    is_clean = ending == "exit caught"
    for step in range(STEPS if rank else 2 * STEPS if is_clean else LONG):
        model(torch.randn(2, 16, 8)).sum().backward()
        if ending == "collective":
            dist.all_reduce(model.qkv.weight.grad)
        time.sleep(0.01)
        if ending == "exit caught" and step == 0:
            with suppress(SystemExit):
                sys.exit(1)
    if rank == 1:
        end(ending)


def end(ending: str) -> None:
    print("ends at", time.time(), flush=True)
    match ending:
        case "exit":
            sys.exit(1)
        case "quit":
            quit(3)
        case "process":
            raise ValueError("a mistake")
        case "collective":
            os._exit(1)


if __name__ == "__main__":
    if sys.argv[1] == "process":
        process = multiprocessing.get_context("spawn").Process(target=train, args=sys.argv[1:])
        process.start()
        process.join()
        sys.exit(process.exitcode)
    train(sys.argv[1])
