"""A job that is opened again under its name: after its ranks were killed, while it lives, after it
ended. The ranks only talk; tests/cluster/end_to_end/test_restart.py has processes that train."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ControlPlane
from distca.contract import rpc
from tests.service.trainer_client.talking_rank import TalkingRank
from tests.service.trainer_client.test_control_link import ranks_of, settings, submit_all
from tests.support.service_harness import client_of, eventually, job_spec, running

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


def test_ranks_started_again_after_a_kill_wait_for_a_lease_and_train(
    control_plane: ControlPlane, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    client = stack.enter_context(client_of(control_plane.address))
    before = started(control_plane, stack)
    old_id = open_all(before)
    kill(*before)
    again, began = started(control_plane, stack), time.monotonic()
    assert open_all(again) != old_id
    assert time.monotonic() - began < LEASE_SECONDS + SLACK_SECONDS
    waits = [r.getMessage() for r in caplog.records if r.name == "distca.contract.held"]
    assert len(waits) == 2
    for rank in (0, 1):
        assert any(
            f"rank {rank} of job train waits for its name for up to 45 s: job {old_id}" in wait
            for wait in waits
        )
    client.register("s0")
    submit_all(again, 0)
    assert all(rank.wait(0).plan.step == 0 for rank in again)
    assert {rank.link.token for rank in again}.isdisjoint(rank.link.token for rank in before)


def test_one_rank_is_killed_and_the_others_run_on(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    before = started(control_plane, stack)
    old_id = open_all(before)
    kill(before[1])
    assert open_all(started(control_plane, stack)) != old_id
    eventually(lambda: before[0].link.failure is not None)
    assert "rank 1 on host-1" in str(before[0].link.failure)


def test_what_is_left_of_a_start_that_was_killed_is_not_joined(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    before = started(control_plane, stack)
    before[0].open()
    kill(before[0])
    eventually(lambda: control_plane.coordinator.jobs()[0]._leases.away == [0])
    again = started(control_plane, stack)
    # The rank whose place is free comes first.
    assert open_all(again[::-1]) != before[0].link.job_id
    time.sleep(1.5 * LEASE_SECONDS)
    assert all(rank.link.failure is None for rank in again)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_other_number_of_ranks_opens_when_the_job_before_has_ended(
    control_plane: ControlPlane, stack: ExitStack, n_ranks: int
) -> None:
    before = started(control_plane, stack)
    old_id = open_all(before)
    kill(*before)
    assert open_all(started(control_plane, stack, n_ranks)) != old_id


def test_job_that_lives_keeps_its_name(control_plane: ControlPlane, stack: ExitStack) -> None:
    running_ranks = started(control_plane, stack)
    job_id = open_all(running_ranks)
    for rank in started(control_plane, stack):
        began = time.monotonic()
        with pytest.raises(rpc.AlreadyExists) as caught:
            rank.open()
        assert time.monotonic() - began < LEASE_SECONDS + SLACK_SECONDS
        assert not isinstance(caught.value, rpc.Held)
        said = str(caught.value)
        assert f"rank {rank.rank} has joined job {job_id} from host-{rank.rank}" in said
        assert "the job lives" in said
        assert "use another name, or end the process" in said
    assert all(rank.link.failure is None for rank in running_ranks)


def test_wait_for_a_name_has_an_end(stack: ExitStack) -> None:
    control_plane = stack.enter_context(running())
    kill(*stack.enter_context(ranks_of(control_plane.address)))
    (rank, _) = started(control_plane, stack, held_timeout_seconds=0.5)
    began = time.monotonic()
    with pytest.raises(rpc.Held, match=r"rank 0 has joined job train-.* from host-0"):
        rank.open()
    assert time.monotonic() - began < SLACK_SECONDS


def test_a_job_that_failed_or_ended_is_opened_again_at_once(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    ids = set()
    for error in ("out of memory", "", ""):
        ranks = started(control_plane, stack)
        ids.add(open_all(ranks))
        for rank in ranks:
            rank.close(error)
    assert len(ids) == 3


def test_rank_that_ends_first_waits_for_the_others(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    before = started(control_plane, stack)
    old_id = open_all(before)
    before[0].close()
    again = started(control_plane, stack)
    with ThreadPoolExecutor(1) as thread:
        opening = thread.submit(again[0].open)
        time.sleep(LEASE_SECONDS / 2)
        assert not opening.done()
        before[1].close()
        opening.result(SLACK_SECONDS)
    assert again[0].link.job_id != old_id


def test_two_starts_race_and_one_is_told_who_was_first(
    control_plane: ControlPlane, stack: ExitStack
) -> None:
    before = started(control_plane, stack, 1)
    open_all(before)
    kill(*before)
    (first,), (second,) = (started(control_plane, stack, 1) for _ in range(2))
    with ThreadPoolExecutor(2) as threads:
        errors = [threads.submit(rank.open).exception() for rank in (first, second)]
    (lost,) = [error for error in errors if error is not None]
    (won,) = [r for r, e in zip((first, second), errors, strict=True) if e is None]
    assert f"rank 0 has joined job {won.link.job_id}" in str(lost)
    assert won.link.failure is None


def test_control_plane_starts_again_while_ranks_wait(stack: ExitStack, tmp_path: Path) -> None:
    limits = {"lease_seconds": 3.0}
    with running(state_dir=tmp_path, coordinator=limits) as control_plane:
        kill(*stack.enter_context(ranks_of(control_plane.address)))
        again = started(control_plane, stack)
        threads = stack.enter_context(ThreadPoolExecutor(2))
        opening = [threads.submit(rank.open) for rank in again]
        time.sleep(0.5)
        assert not any(each.done() for each in opening)
    with running(
        state_dir=tmp_path, coordinator=limits, listen_address=control_plane.address
    ) as restarted:
        for each in opening:
            each.result(SLACK_SECONDS)
        assert restarted.coordinator.job(again[0].link.job_id).joined_ranks == [0, 1]
        for rank in again:
            rank.close()


def test_rank_that_came_back_and_died_holds_the_name_until_its_lease_ends(
    stack: ExitStack, tmp_path: Path
) -> None:
    limits = {"lease_seconds": 1.5}
    with running(state_dir=tmp_path, coordinator=limits) as control_plane:
        before = started(control_plane, stack)
        open_all(before)
        kill(before[1])
    with running(state_dir=tmp_path, coordinator=limits, listen_address=control_plane.address):
        eventually(lambda: before[0].link.connected)
        kill(before[0])
        again = started(control_plane, stack)
        assert open_all(again) != before[0].link.job_id
        for rank in again:
            rank.close()


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
