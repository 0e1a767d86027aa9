"""Collectives of FSDP2 and DDP wait on the host until all ranks have come."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from distca.train.sharding import ShardedModel
from tests.forkserver import run_forked
from trainer_client import HostBarriers
from trainer_client.integrations import host_barriers

pytestmark = pytest.mark.training

RANKS, LATE_SECONDS, TIMEOUT_SECONDS = 2, 1.0, 30.0


def model() -> tuple[nn.Sequential, list[nn.Module]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    return nn.Sequential(*layers), layers


def wrapped(kind: str, barriers: HostBarriers | None) -> nn.Module:
    whole, layers = model()
    if kind == "sharded":
        sharded = ShardedModel(
            whole, layers, mesh=init_device_mesh("cpu", (RANKS,)), compute_dtype=torch.float32,
            barriers=barriers,
        )  # fmt: skip
        module: nn.Module = sharded.module
        return module
    replicated = DistributedDataParallel(whole)
    if barriers is not None:
        barriers.guard_replicated(replicated)
    return replicated


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Whole gradients, of forward and backward of a batch that differs by rank."""
    module(torch.full((4, 8), float(dist.get_rank() + 1))).pow(2).mean().backward()
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        grad: Any = parameter.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return found


@contextmanager
def process_group(rank: int, folder: str, n_ranks: int) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=n_ranks
    )
    yield
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, folder: str, kind: str, body: Any) -> None:
    with process_group(rank, folder, RANKS):
        body(rank, kind)


def equal_gradients(rank: int, kind: str) -> None:
    plain = gradients(wrapped(kind, None))
    for ours, theirs in zip(
        gradients(wrapped(kind, HostBarriers(TIMEOUT_SECONDS))), plain, strict=True
    ):
        assert torch.equal(ours, theirs)


def nothing_is_launched_early(rank: int, kind: str) -> None:
    """The last rank comes late to the step; no other has launched anything by then."""
    module = wrapped(kind, HostBarriers(TIMEOUT_SECONDS))
    launched: list[float] = []

    def noted(launch: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            launched.append(time.monotonic())
            return launch(*arguments, **options)

        return run

    for name in ("_all_gather", "_reduce_scatter", "allreduce_hook"):
        setattr(host_barriers, name, noted(getattr(host_barriers, name)))
    dist.barrier()
    if rank == RANKS - 1:
        time.sleep(LATE_SECONDS)
    came = time.monotonic()
    gradients(module)
    assert launched
    # The clock is the machine's: comparable between processes.
    times: list[Any] = [None] * RANKS
    dist.all_gather_object(times, (came, min(launched)))
    last = max(when for when, _ in times)
    assert all(first >= last for _, first in times)


def a_rank_that_stays_away(rank: int, kind: str) -> None:
    barriers = HostBarriers(1.0)
    if rank == 0:
        with pytest.raises(RuntimeError):
            barriers.meet()
    else:
        time.sleep(3.0)


GROUPS = ((0, 2, 3), (1, 4))
"""Of a job of five: three ranks, and two, are replicas of the stages of a pipeline."""


def run_rank_of_groups(rank: int, folder: str, body: Any) -> None:
    with process_group(rank, folder, sum(map(len, GROUPS))):
        made = [dist.new_group(list(ranks)) for ranks in GROUPS]
        at = 0 if rank in GROUPS[0] else 1
        body(rank, GROUPS[at], made[at])


@contextmanager
def one_group_after_the_other(ranks: tuple[int, ...]) -> Iterator[None]:
    """The second group begins the block when the first has ended it: that needs nobody of it."""
    if ranks is GROUPS[1]:
        dist.barrier()
    yield
    if ranks is GROUPS[0]:
        dist.barrier()


def groups_do_not_wait_for_each_other(rank: int, ranks: tuple[int, ...], group: Any) -> None:
    """One group meets many times while the other has not begun; nobody leaves before all come."""
    barriers = HostBarriers(TIMEOUT_SECONDS)
    with one_group_after_the_other(ranks):
        for late in (*ranks, *ranks):
            if rank == late:
                time.sleep(0.2)
            came = time.monotonic()
            barriers.meet(group)
            left = time.monotonic()
            times: list[Any] = [None] * len(ranks)
            dist.all_gather_object(times, (came, left), group)
            assert min(left for _, left in times) >= max(came for came, _ in times)


def stages_have_their_own_replicas(rank: int, ranks: tuple[int, ...], group: Any) -> None:
    """Replicas of one stage, sharded or not, while those of the other wait for what it sends."""
    barriers = HostBarriers(TIMEOUT_SECONDS)
    whole, layers = model()
    mesh = DeviceMesh.from_group(group, "cpu")
    sharded = ShardedModel(
        whole, layers, mesh=mesh, compute_dtype=torch.float32, barriers=barriers
    ).module
    replicated = DistributedDataParallel(model()[0], process_group=group)
    barriers.guard_replicated(replicated)
    with one_group_after_the_other(ranks):
        for module in (sharded, replicated):
            plain = model()[0]
            batches = [torch.full((4, 8), float(one + 1)) for one in ranks]
            torch.stack([plain(batch).pow(2).mean() for batch in batches]).mean().backward()
            for ours, theirs in zip(gradients(module), plain.parameters(), strict=True):
                torch.testing.assert_close(ours, theirs.grad)


def a_rank_of_a_group_that_stays_away(rank: int, ranks: tuple[int, ...], group: Any) -> None:
    barriers = HostBarriers(1.0)
    if rank == ranks[-1]:
        time.sleep(3.0)
    else:
        with pytest.raises(RuntimeError):
            barriers.meet(group)


@pytest.mark.parametrize(
    "body",
    [
        groups_do_not_wait_for_each_other,
        stages_have_their_own_replicas,
        a_rank_of_a_group_that_stays_away,
    ],
)
def test_ranks_of_a_group_meet(tmp_path: Path, body: Any) -> None:
    run_forked(run_rank_of_groups, (str(tmp_path), body), 5)


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
@pytest.mark.parametrize("body", [equal_gradients, nothing_is_launched_early])
def test_ranks_meet_before_collectives(tmp_path: Path, kind: str, body: Any) -> None:
    run_forked(run_rank, (str(tmp_path), kind, body), RANKS)


def test_a_barrier_has_a_deadline(tmp_path: Path) -> None:
    run_forked(run_rank, (str(tmp_path), "", a_rank_that_stays_away), RANKS)
