"""Sessions of one job that do not run the same steps: whoever waits for the others is told within
seconds, and closing waits for nobody who has left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from core_attention.manifest import RankManifest, Segment
from tests.cluster.end_to_end.restarted_rank import Model, rows_of
from tests.support.cluster import NODE_SHAPE, Cluster, cluster
from tests.support.loops import PingPong
from tests.support.team import Team
from trainer_client import Session
from trainer_client.errors import CoreAttentionFailed, PlanNotReady

LEASE_SECONDS = 3.0
LEAVE_SECONDS = 5.0
SLACK_SECONDS = 8.0
"""Two busy cores. Together far below 30 s, which nobody waits longer for what cannot come."""

ROWS = 64


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("apart"), 0, lease_seconds=LEASE_SECONDS) as running:
        yield running


@pytest.fixture
def sessions(running: Cluster) -> Iterator[list[Session]]:
    # The timeouts that users have.
    team = Team(
        running,
        2,
        NODE_SHAPE,
        n_layers=2,
        placement="in-place",
        plan_timeout_seconds=60.0,
        tick_timeout_seconds=120.0,
    )
    with team:
        yield team.sessions


def spanning(step: int, rank: int) -> RankManifest:
    """In each nano-batch one document, of which each rank has a half."""
    segments = [Segment(1 + n, 2 * ROWS, ROWS * rank, ROWS) for n in range(2)]
    return RankManifest(step, rank, tuple((segment,) for segment in segments))


def apart(step: int, rank: int) -> RankManifest:
    return RankManifest.from_lengths(step, rank, [[ROWS], [ROWS]])


def train(session: Session, step: int) -> None:
    with session.step(step):
        outputs = PingPong(Model())([rows_of(ROWS) for _ in range(2)])
        torch.autograd.backward([output.sum() for output in outputs])


def together(*ranks: Callable[[], object]) -> list[Future[object]]:
    """Runs what each rank does in a thread of its own, to the end."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return [threads.submit(rank) for rank in ranks]


def test_nobody_waits_for_a_rank_that_passes_over_a_step(
    sessions: list[Session],
) -> None:
    for rank, session in enumerate(sessions):
        for step in (0, 1, 2):
            if (rank, step) != (1, 1):
                session.submit(spanning(step, rank))
    took: list[float] = []

    def waits() -> None:
        train(sessions[0], 0)
        began = time.monotonic()
        with pytest.raises(PlanNotReady):
            train(sessions[0], 1)
        took.append(time.monotonic() - began)
        sessions[0].close()

    def goes_on() -> None:
        train(sessions[1], 0)
        with pytest.raises(CoreAttentionFailed):
            train(sessions[1], 2)
        took.append(time.monotonic() - began)
        sessions[1].close()

    began = time.monotonic()
    for future in together(waits, goes_on):
        future.result()
    assert took[0] < LEASE_SECONDS / 3 + SLACK_SECONDS
    assert took[1] < LEASE_SECONDS / 3 + LEAVE_SECONDS + SLACK_SECONDS


def test_nobody_waits_for_a_rank_that_has_left(sessions: list[Session]) -> None:
    for rank, session in enumerate(sessions):
        session.submit(spanning(0, rank))

    def leaves() -> None:
        time.sleep(0.5)
        sessions[1].close()

    began = time.monotonic()
    waits, left = together(lambda: train(sessions[0], 0), leaves)
    left.result()
    with pytest.raises(CoreAttentionFailed):
        waits.result()
    assert time.monotonic() - began < LEAVE_SECONDS + SLACK_SECONDS


def test_closing_waits_for_nobody_who_has_left(sessions: list[Session]) -> None:
    for rank, session in enumerate(sessions):
        session.submit(apart(0, rank))
    train(sessions[0], 0)
    sessions[1].close()
    began = time.monotonic()
    sessions[0].close()
    assert time.monotonic() - began < SLACK_SECONDS
