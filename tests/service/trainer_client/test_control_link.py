"""The trainer's link, with real control planes in this process that come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from control_plane.server import ControlPlane
from core_attention.manifest import RankManifest, Segment
from distca.contract import rpc
from tests.service.trainer_client.talking_rank import WAIT_SECONDS, TalkingRank
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    client_of,
    rank_manifest,
    running,
)
from tests.support.waiting import eventually
from trainer_client.errors import PlanNotReady, SessionClosed


def settings(address: str) -> rpc.RpcSettings:
    return rpc.RpcSettings(address=address, connect_seconds=5.0)


@contextmanager
def ranks_of(address: str, **options: Any) -> Iterator[list[TalkingRank]]:
    """Two ranks that have joined, and leave at the end."""
    ranks = [TalkingRank(settings(address), rank, **options) for rank in (0, 1)]
    try:
        for rank in ranks:
            rank.open()
        yield ranks
    finally:
        for rank in ranks:
            rank.close()


def submit_all(ranks: Sequence[TalkingRank], *steps: int) -> None:
    for step in steps:
        for rank in ranks:
            rank.submit(step)


def test_what_is_said_while_a_stream_breaks_is_said_on_the_next(
    control_plane: ControlPlane, client: Client
) -> None:
    client.register("s0")
    with ranks_of(control_plane.address) as ranks:
        for step in range(3):
            for rank in ranks:
                rank.break_stream()
            submit_all(ranks, step)
            assert [rank.wait(step).at_home for rank in ranks] == [False, False]
            eventually(lambda: all(rank.link.connected for rank in ranks))


def test_training_goes_on_under_a_control_plane_that_starts_again(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "state_dir": tmp_path,
        "coordinator": {"rejoin_seconds": 0.5},
    }
    with ExitStack() as stack:
        first = stack.enter_context(running(**settings))
        with client_of(first.address) as client:
            client.register("s0")
        with ranks_of(first.address) as ranks:
            submit_all(ranks, 0, 1)
            for rank in ranks:
                old = rank.wait(0)
                rank.progress = {0: [1, 1]}
                rank.receives(("planned", 1))
            stack.close()
            eventually(lambda: not any(rank.link.connected for rank in ranks))
            # What is handed in and reported meanwhile is not lost.
            submit_all(ranks, 2)
            assert ranks[0].wait(1).plan.epoch == old.plan.epoch
            with fails(rpc.Reason.UNAVAILABLE):
                ranks[0].link.fetch_step(0)
            with (
                running(listen_address=first.address, **settings),
                client_of(first.address) as client,
            ):
                client.register("s0")
                eventually(lambda: not any(rank.link.away_seconds for rank in ranks))
                for rank in ranks:
                    new = rank.wait(2)
                    assert new.plan.epoch > old.plan.epoch
                    assert ("recover", []) in rank.received
                    again = rank.plan_of(0)
                    assert again is not None
                    assert again.first_tick.tolist() == [1, 1, 1]
                    for step in (0, 1, 2):
                        rank.report(step)
                for rank in ranks:
                    rank.receives(("finished", 2))
                    rank.link.close("")


def test_time_without_a_control_plane_does_not_count(tmp_path: Path) -> None:
    with ExitStack() as stack:
        first = stack.enter_context(running(state_dir=tmp_path))
        with ranks_of(first.address) as ranks:
            # It goes on in another rank's rows, so that the wait cannot end at home.
            ranks[0].submit(0, manifest=RankManifest(0, 0, [[Segment(1, 9, 0, 5)], []]))
            stack.close()
            eventually(lambda: not any(rank.link.connected for rank in ranks))
            began = time.monotonic()
            result: list[Any] = []

            def wait() -> None:
                with pytest.raises(PlanNotReady) as caught:
                    ranks[0].wait(0, 0.5)
                result.append(str(caught.value))

            waiter = threading.Thread(target=wait)
            waiter.start()
            waiter.join(1.5)
            assert waiter.is_alive()
            with running(listen_address=first.address, state_dir=tmp_path):
                waiter.join(WAIT_SECONDS)
                assert time.monotonic() - began > 1.5
                assert result == [
                    "step 0: no plan in 0.5 s; ranks [1] have not submitted their manifests"
                ]
                for rank in ranks:
                    rank.link.close("")


def test_a_standby_is_found_at_the_next_address(tmp_path: Path) -> None:
    with ExitStack() as leading, running(state_dir=tmp_path) as second:
        first = leading.enter_context(running(state_dir=tmp_path))
        with ranks_of(f"{first.address},{second.address}") as ranks:
            submit_all(ranks, 0)
            ranks[0].wait(0)
            leading.close()
            for rank in ranks:
                rank.receives(("recover", []))
            assert second.coordinator.job(ranks[0].link.job_id).leases.joined == [0, 1]


def test_a_job_that_lives_keeps_its_name_unless_it_is_replaced(
    control_plane: ControlPlane,
) -> None:
    with ranks_of(control_plane.address) as ranks:
        eventually(lambda: all(rank.link.connected for rank in ranks))
        second = TalkingRank(settings(control_plane.address))
        with fails(rpc.Reason.ALREADY_EXISTS):
            second.open()
        second.close()
        assert all(rank.link.failure is None for rank in ranks)
        with ranks_of(control_plane.address, replace=True):
            eventually(lambda: all(rank.link.failure is not None for rank in ranks))


def test_a_control_plane_without_memory_ends_jobs_whose_names_are_free_then() -> None:
    with ExitStack() as stack:
        first = stack.enter_context(running())
        with ranks_of(first.address) as ranks:
            stack.close()
            with running(listen_address=first.address):
                eventually(lambda: all(rank.link.failure is not None for rank in ranks))
                with ranks_of(first.address):
                    pass


def test_a_control_plane_that_stays_away_ends_the_job() -> None:
    with ExitStack() as stack:
        control_plane = stack.enter_context(running())
        rank = TalkingRank(settings(control_plane.address), 0, control_plane_timeout_seconds=0.5)
        rank.open()
        stack.close()
        eventually(lambda: rank.link.failure is not None)
        with pytest.raises(SessionClosed):
            rank.link.check()
        rank.link.close("")


def test_the_last_reports_are_sent_before_leaving(
    control_plane: ControlPlane, client: Client
) -> None:
    client.register("s0")
    with ranks_of(control_plane.address) as ranks:
        submit_all(ranks, 0)
        for rank in ranks:
            rank.wait(0)
        ranks[0].report(0)
        ranks[0].link.close("")
        eventually(lambda: len(ranks[1].link.fetch_step(0).ranks) == 1)
        with pytest.raises(SessionClosed):
            ranks[0].submit(1)


def test_an_error_closes_the_job_for_the_others(control_plane: ControlPlane) -> None:
    with ranks_of(control_plane.address) as ranks:
        ranks[0].link.close("out of memory")
        eventually(lambda: ranks[1].link.failure is not None)
        assert "rank 0 failed: out of memory" in str(ranks[1].link.failure)
        with pytest.raises(SessionClosed):
            ranks[1].wait(0)


def test_a_refused_manifest_and_a_step_without_a_plan_are_told_to_who_waits(
    control_plane: ControlPlane, client: Client
) -> None:
    with ranks_of(control_plane.address) as ranks:
        with pytest.raises(PlanNotReady):
            ranks[0].wait(0)
        ranks[0].submit(0, manifest=rank_manifest(0, 1))
        with pytest.raises(PlanNotReady):
            ranks[0].wait(0)
        ranks[0].submit(0)
        ranks[1].submit(0, forward_only=True)
        with pytest.raises(PlanNotReady):
            ranks[0].wait(0)
        client.register("s0")
        submit_all(ranks, 0)
        assert ranks[0].wait(0).plan.step == 0
