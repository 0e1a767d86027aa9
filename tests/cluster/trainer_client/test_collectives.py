"""Every collective waits on the host until all its ranks have come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.support.preloaded import run_forked
from tests.support.process_groups import process_group
from trainer_client.errors import SessionClosed, SessionError
from trainer_client.hooks.collectives import HostMeetings

RANKS, LATE_SECONDS, TIMEOUT_SECONDS = 2, 1.0, 30.0


def nothing() -> None:
    pass


@contextmanager
def meeting(
    timeout_seconds: float = TIMEOUT_SECONDS,
    check: Callable[[], None] = nothing,
    n_ranks: int | None = None,
) -> Iterator[HostMeetings]:
    """Collectives on the CPU meet, as those of a session on a GPU do."""
    n_ranks = n_ranks or dist.get_world_size()
    meetings = HostMeetings("job", n_ranks, check, timeout_seconds, device_type="cpu")
    meetings.open()
    try:
        yield meetings
    finally:
        meetings.close()


def model() -> tuple[nn.Sequential, list[nn.Module]]:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, 8) for _ in range(3)]
    return nn.Sequential(*layers), layers


def sharded() -> nn.Module:
    whole, layers = model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    return whole


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """Whole gradients, of forward and backward of a batch that differs by rank."""
    module(torch.full((4, 8), float(dist.get_rank() + 1))).pow(2).mean().backward()
    found = []
    for parameter in module.parameters():
        assert parameter.grad is not None
        grad: Any = parameter.grad
        found.append(grad.full_tensor() if hasattr(grad, "full_tensor") else grad)
    return found


def users_own() -> None:
    """A user's metric, gathered objects and a barrier, with and without waiting."""
    value = torch.ones(3)
    dist.all_reduce(value, async_op=True).wait()
    assert value.tolist() == [dist.get_world_size()] * 3
    with torch.inference_mode():
        dist.broadcast(torch.ones(2), 0)
    dist.all_gather_object([None] * dist.get_world_size(), "x")
    dist.barrier()


COLLECTIVES: dict[str, Callable[[], Any]] = {
    "DDP": lambda: gradients(DistributedDataParallel(model()[0])),
    "FSDP2": lambda: gradients(sharded()),
    "user": users_own,
}


def run_rank(rank: int, folder: str, body: Callable[..., None], *args: Any) -> None:
    with process_group(folder, rank, RANKS):
        body(rank, *args)


class Watched(HostMeetings):
    """Notes when collectives are let through; the clock is the machine's, equal in all
    processes."""

    def before(self, name: str, group: dist.ProcessGroup, tensors: Any) -> None:
        super().before(name, group, tensors)
        passed.append(time.monotonic())


passed: list[float] = []


def nothing_is_launched_early(rank: int, which: str) -> None:
    """The last rank comes late; no other has launched anything by then."""
    COLLECTIVES[which]()  # Connects.
    meetings = Watched("job", RANKS, nothing, TIMEOUT_SECONDS, device_type="cpu")
    dist.barrier()
    meetings.open()
    if rank == RANKS - 1:
        time.sleep(LATE_SECONDS)
    came = time.monotonic()
    COLLECTIVES[which]()
    meetings.close()
    n_met, first = len(passed), passed[0]
    COLLECTIVES[which]()
    assert len(passed) == n_met > 0, "closed meetings have nobody meet"
    times: list[Any] = [None] * RANKS
    dist.all_gather_object(times, (came, first))
    assert min(first for _, first in times) >= max(came for came, _ in times)


@pytest.mark.parametrize("which", COLLECTIVES)
def test_ranks_meet_before_collectives(tmp_path: Path, which: str) -> None:
    run_forked(run_rank, (str(tmp_path), nothing_is_launched_early, which), RANKS)


def a_rank_stays_away(rank: int) -> None:
    with meeting(timeout_seconds=1.0):
        if rank == 0:
            with pytest.raises(SessionError):
                dist.all_reduce(torch.ones(1))
        else:
            time.sleep(3.0)


def the_job_ends_meanwhile(rank: int) -> None:
    def check() -> None:
        if rank == 0 and time.monotonic() > began + LATE_SECONDS:
            raise SessionClosed("rank 1 left")

    began = time.monotonic()
    with meeting(check=check):
        if rank == 0:
            with pytest.raises(SessionClosed):
                dist.all_reduce(torch.ones(1))
            assert time.monotonic() - began < TIMEOUT_SECONDS / 2
        else:
            time.sleep(3.0)


def threads_of_two_groups_meet(rank: int) -> None:
    """An optimizer's thread and autograd's, each with a group of all ranks, in any order."""
    groups = [dist.new_group() for _ in range(2)]
    sums: dict[int, float] = {}

    def run(index: int) -> None:
        for _ in range(50):
            value = torch.ones(1)
            dist.all_reduce(value, group=groups[index])
        sums[index] = value.item()

    with meeting():
        order = (0, 1) if rank == 0 else (1, 0)
        threads = [threading.Thread(target=run, args=(index,)) for index in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sums == {0: RANKS, 1: RANKS}


def a_job_of_some_ranks_does_not_wait_for_the_others(rank: int) -> None:
    if rank == 0:
        with meeting(n_ranks=1):
            dist.all_reduce(torch.ones(1))
    else:
        dist.all_reduce(torch.ones(1))


def a_process_opens_a_job_again(rank: int) -> None:
    for number in range(2):
        meetings = HostMeetings(f"job-{number}", RANKS, nothing, TIMEOUT_SECONDS, "cpu")
        meetings.open()
        dist.all_reduce(torch.ones(1))
        meetings.close()


@pytest.mark.parametrize(
    "body",
    [
        a_rank_stays_away,
        the_job_ends_meanwhile,
        threads_of_two_groups_meet,
        a_job_of_some_ranks_does_not_wait_for_the_others,
        a_process_opens_a_job_again,
    ],
)
def test_meetings(tmp_path: Path, body: Any) -> None:
    run_forked(run_rank, (str(tmp_path), body), RANKS)


GROUPS = ((0, 2, 3), (1, 4))
"""Of a job of five: three ranks, and two, are replicas of the stages of a pipeline."""


def groups_do_not_wait_for_each_other(rank: int, folder: str) -> None:
    """Replicas of one stage, while those of the other wait for what it sends."""
    with process_group(folder, rank, sum(map(len, GROUPS))):
        groups = [dist.new_group(list(ranks)) for ranks in GROUPS]
        mine = 0 if rank in GROUPS[0] else 1
        ranks = GROUPS[mine]
        if mine == 1:
            dist.barrier()
        with meeting():
            replicated = DistributedDataParallel(model()[0], process_group=groups[mine])
            found = gradients(replicated)
        if mine == 0:
            dist.barrier()
        plain = model()[0]
        batches = [torch.full((4, 8), float(one + 1)) for one in ranks]
        torch.stack([plain(batch).pow(2).mean() for batch in batches]).mean().backward()
        for ours, theirs in zip(found, plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.grad)


def test_ranks_of_a_group_meet(tmp_path: Path) -> None:
    run_forked(groups_do_not_wait_for_each_other, (str(tmp_path),), 5)
