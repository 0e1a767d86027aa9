"""A job that is opened again under its name: after its ranks were killed, while it lives, after it
ended. The ranks only talk; tests/cluster/end_to_end/test_restart.py has processes that train."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from control_plane.server import ControlPlane
from distca.contract import rpc
from tests.service.trainer_client.talking_rank import TalkingRank
from tests.service.trainer_client.test_control_link import settings, submit_all
from tests.support.errors import fails
from tests.support.service_harness import client_of, job_spec, running
from tests.support.waiting import eventually

LEASE_SECONDS = 1.0
SLACK_SECONDS = 5.0
"""Two busy cores; far below what a wait that finds no end would take."""


@pytest.fixture
def control_plane() -> Iterator[ControlPlane]:
    with running(coordinator={"lease_seconds": LEASE_SECONDS}) as control_plane:
        yield control_plane


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def kill(*ranks: TalkingRank) -> None:
    """What SIGKILL does: connections break, and nobody leaves the job."""
    for rank in ranks:
        rank.link._left = True
        rank.link._outbox.close(SLACK_SECONDS)
        rank.link._lifeline.end()


def started(
    control_plane: ControlPlane, stack: ExitStack, n_ranks: int = 2, **options: Any
) -> list[TalkingRank]:
    """The ranks of one start; they leave at the end."""
    spec = job_spec(n_ranks=n_ranks)
    ranks = [
        TalkingRank(settings(control_plane.address), rank, spec, **options)
        for rank in range(n_ranks)
    ]
    for rank in ranks:
        stack.callback(rank.close)
    return ranks


def open_all(ranks: Sequence[TalkingRank]) -> str:
    """All open the job at once, as processes do that are started together; returns its id."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        for opening in [threads.submit(rank.open) for rank in ranks]:
            opening.result()
    (job_id,) = {rank.link.job_id for rank in ranks}
    return job_id


def test_ranks_started_again_after_a_kill_train_at_once(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    client = stack.enter_context(client_of(control_plane.address))
    before = started(control_plane, stack)
    old_id = open_all(before)
    kill(*before)
    again = started(control_plane, stack)
    eventually(lambda: control_plane.coordinator.job(old_id).leases.away == [0, 1])
    assert open_all(again) != old_id
    client.register("s0")
    submit_all(again, 0)
    assert all(rank.wait(0).plan.step == 0 for rank in again)
    assert {rank.link.token for rank in again}.isdisjoint(rank.link.token for rank in before)


@pytest.mark.parametrize("replace", [False, True])
def test_job_that_lives_keeps_its_name_unless_it_is_replaced(
    control_plane: ControlPlane, stack: ExitStack, replace: bool
) -> None:
    running_ranks = started(control_plane, stack)
    old_id = open_all(running_ranks)
    for rank in running_ranks:
        eventually(lambda rank=rank: rank.link.connected)  # type: ignore[misc]
    again = started(control_plane, stack, replace=replace)
    if replace:
        assert open_all(again) != old_id
        for rank in running_ranks:
            eventually(lambda rank=rank: rank.link.failure is not None)  # type: ignore[misc]
    else:
        for rank in again:
            with fails(rpc.Reason.ALREADY_EXISTS):
                rank.open()
        assert all(rank.link.failure is None for rank in running_ranks)


def test_tokens_of_a_control_plane_without_memory_are_void_and_the_name_is_free(
    stack: ExitStack,
) -> None:
    with running() as control_plane:
        before = started(control_plane, stack)
        open_all(before)
    with running(listen_address=control_plane.address):
        eventually(lambda: all(rank.link.failure is not None for rank in before))
        again = started(control_plane, stack)
        open_all(again)
        for rank in again:
            rank.close()
