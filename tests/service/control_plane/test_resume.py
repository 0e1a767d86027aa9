"""Ranks that come back: to a control plane that has started again, or after losing their lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from control_plane.access.job_keys import MIN_SECRET_BYTES
from control_plane.leadership.epochs import GENERATION_BITS
from core_attention.manifest import RankManifest
from core_attention.step_lane import placed
from core_attention.whole_file import write_whole
from distca.contract import rpc
from distca.contract.codec import rank_manifest_to_proto
from distca.v1 import jobs_pb2
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    Watcher,
    client_of,
    job_spec,
    rank_manifest,
    running,
    server_description,
)


@contextmanager
def started(folder: Path, **coordinator: Any) -> Iterator[tuple[TimedControlPlane, Client]]:
    """A control plane that keeps its state in ``folder``."""
    with (
        running(
            coordinator={"rejoin_seconds": 0.05, **coordinator}, state_dir=folder
        ) as control_plane,
        client_of(control_plane.address) as client,
    ):
        yield control_plane, client


class Rank:
    """A rank that outlives control planes."""

    def __init__(self, rank: int, spec: jobs_pb2.JobSpec | None = None) -> None:
        self.rank = rank
        self.spec = spec or job_spec()
        self.epoch = 0
        self.job_id = ""
        self.lease = ""
        self.token = b""

    def open(self, client: Client) -> None:
        """Joins, or comes back."""
        request = jobs_pb2.OpenJobRequest(spec=self.spec, rank=self.rank, host=f"host-{self.rank}")
        if self.spec.placement != jobs_pb2.PLACEMENT_POOL:
            request.in_place_server.CopyFrom(
                server_description(f"{self.spec.name}.rank-{self.rank}")
            )
        if self.job_id:
            request.resume.job_id, request.resume.epoch = self.job_id, self.epoch
            client.tokens.of[request.resume.job_id] = self.token
        answer = client.jobs.OpenJob(request, metadata=self._metadata())
        client.tokens.opened(answer)
        self.job_id, self.lease, self.token = answer.job_id, answer.rank_lease_id, answer.token

    def watch(self, client: Client) -> Watcher:
        watcher = client.watch_rank(self.job_id, self.lease)
        assert watcher.next("job_opened").job_id == self.job_id
        return watcher

    def renew(self, client: Client) -> None:
        client.jobs.RenewRank(
            jobs_pb2.RenewRankRequest(job_id=self.job_id, rank_lease_id=self.lease)
        )

    def submit(self, client: Client, step: int) -> None:
        client.submit(self.job_id, self.lease, rank_manifest(step, self.rank))

    def join(self, client: Client, sequence: int, step: int | None = None, **fields: Any) -> None:
        """Joins the open step, or comes back with a step that has a number."""
        manifest = RankManifest.from_lengths(0, self.rank, [[30 + self.rank], []])
        if step is not None:
            manifest = placed(manifest, step, 1)
        joining = jobs_pb2.Joining(
            sequence=sequence, awaited=True, numbered=step is not None, **fields
        )
        message = jobs_pb2.HandIn(manifest=rank_manifest_to_proto(manifest), joining=joining)
        client.hand_in(self.job_id, self.lease, message)

    def _metadata(self) -> list[tuple[str, bytes]]:
        return [("distca-job-token-bin", self.token)] if self.token else []


def open_pair(client: Client, **spec: Any) -> list[Rank]:
    ranks = [Rank(rank, job_spec(**spec)) for rank in (0, 1)]
    for rank in ranks:
        rank.open(client)
    return ranks


def test_job_goes_on_under_a_control_plane_that_has_started_again(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client):
        client.register("s0")
        ranks = open_pair(client)
        watchers = [rank.watch(client) for rank in ranks]
        for rank in ranks:
            rank.submit(client, 4)
        plans = [watcher.next("step_planned").plan for watcher in watchers]
        for rank, plan in zip(ranks, plans, strict=True):
            rank.epoch = plan.epoch
    before = [(rank.job_id, rank.token) for rank in ranks]

    with started(tmp_path) as (_, client):
        server = client.watch_server(client.register("s0"))
        for rank in ranks:
            rank.open(client)
            for step in (4, 5):
                rank.submit(client, step)
        assert [(rank.job_id, rank.token) for rank in ranks] == before
        watchers = [rank.watch(client) for rank in ranks]
        recovers = [watcher.next("recover") for watcher in watchers]
        assert recovers[0] == recovers[1]
        epoch = recovers[0].epoch
        assert epoch >> GENERATION_BITS > ranks[0].epoch >> GENERATION_BITS
        assert recovers[0].lost_server_ids == []
        assert recovers[0].reason == "the control plane has been away"
        assert server.next("job_opened").job_id == ranks[0].job_id
        assert server.next("recover") == recovers[0]

        for rank, ticks in zip(ranks, ([5, 4], [3, 3]), strict=True):
            client.report_progress(rank.job_id, rank.lease, epoch, {4: ticks, 5: [0, 0]})
        for watcher, expected in zip(watchers, ([5, 5, 4], [3, 3, 3]), strict=True):
            planned = watcher.next("step_planned")
            assert (planned.plan.manifest.step, planned.plan.epoch) == (4, epoch)
            assert np.frombuffer(planned.first_tick, "<i4").tolist() == expected
            planned = watcher.next("step_planned")
            assert (planned.plan.manifest.step, planned.first_tick) == (5, b"")


def test_steps_that_ranks_join_keep_their_numbers_under_another_control_plane(
    tmp_path: Path,
) -> None:
    """Rank 0 makes one forward more, and its hand-in after that is under way when the control plane
    ends; rank 1 has not heard of its last plan."""
    with started(tmp_path) as (_, client):
        client.register("s0")
        ranks = open_pair(client)
        watchers = [rank.watch(client) for rank in ranks]
        for rank in ranks:
            rank.join(client, 1)
        for rank in ranks:
            rank.join(client, 1)
        ranks[0].join(client, 2)
        for sequence in (1, 2):
            planned = watchers[0].next("step_planned")
            assert (planned.plan.manifest.step, planned.sequence) == (sequence - 1, sequence)
        ranks[0].epoch = planned.plan.epoch
        planned = [watchers[1].next("step_planned") for _ in range(2)]
        assert [each.sequence for each in planned] == [1, 0]
        for rank in ranks:
            client.report_rank(rank.job_id, rank.lease, 0, rank.rank)
        for watcher in watchers:
            assert watcher.next("step_finished").step == 0

    with started(tmp_path) as (_, client):
        client.register("s0")
        for rank in ranks:
            rank.open(client)
        ranks[0].join(client, 2, step=1)
        ranks[0].join(client, 3, first_step=2)
        ranks[1].join(client, 2, first_step=2)
        watchers = [rank.watch(client) for rank in ranks]
        (epoch,) = {watcher.next("recover").epoch for watcher in watchers}
        client.report_progress(ranks[0].job_id, ranks[0].lease, epoch, {1: [0, 3]})
        client.report_progress(ranks[1].job_id, ranks[1].lease, epoch, {})
        for watcher in watchers:
            assert watcher.next("step_finished").step == 0
        for step, sequences in ((1, (0, 0)), (2, (3, 2))):
            for watcher, sequence in zip(watchers, sequences, strict=True):
                planned = watcher.next("step_planned")
                assert (planned.plan.manifest.step, planned.sequence) == (step, sequence)
                first = np.frombuffer(planned.first_tick, "<i4").tolist()
                assert first == ([3] if (step, watcher) == (1, watchers[0]) else [])


def test_epoch_is_above_all_that_ranks_have_seen_even_if_state_was_lost(tmp_path: Path) -> None:
    """And the recovery begins when servers have had the time to register."""
    secret = tmp_path / "state" / "token-secret"
    secret.parent.mkdir()
    write_whole(secret, b"s" * MIN_SECRET_BYTES, mode=0o600)
    with started(secret.parent) as (_, client):
        ranks = open_pair(client)
    far_ahead = 1 << 60
    ranks[1].epoch = far_ahead
    with started(secret.parent, rejoin_seconds=20.0) as (control_plane, client):
        for rank in ranks:
            rank.open(client)
        watcher = ranks[0].watch(client)
        control_plane.pass_time(10.0)
        assert watcher.is_quiet()
        control_plane.pass_time(10.0)
        assert watcher.next("recover").epoch == far_ahead + 1


@pytest.mark.parametrize(("server_lost_it", "seconds"), [(True, 6.0), (False, 31.0)])
def test_rank_that_does_not_come_back_is_waited_for_less_long_if_servers_have_lost_it(
    tmp_path: Path, server_lost_it: bool, seconds: float
) -> None:
    with started(tmp_path) as (_, client):
        ranks = open_pair(client)
    with started(tmp_path, lost_rank_seconds=5.0) as (control_plane, client):
        if server_lost_it:
            # A server may be back before any rank is.
            client.report_rank_lost(client.register("s0"), ranks[0].job_id, 1)
        ranks[0].open(client)
        watcher = ranks[0].watch(client)
        control_plane.pass_time(0.5 * seconds)
        assert not is_closed(client, ranks[0])
        control_plane.pass_time(0.5 * seconds)
        assert "ranks [1] have not come back" in watcher.next("job_closed").error


def is_closed(client: Client, rank: Rank) -> bool:
    """Keeps the rank alive meanwhile."""
    request = jobs_pb2.RenewRankRequest(job_id=rank.job_id, rank_lease_id=rank.lease)
    try:
        client.jobs.RenewRank(request)
    except rpc.RpcError as error:
        return error.reason is rpc.Reason.UNKNOWN_JOB
    return False


def test_rank_takes_up_its_own_lease_and_in_place_server(tmp_path: Path) -> None:
    with started(tmp_path) as (control_plane, client):
        ranks = open_pair(client, placement=jobs_pb2.PLACEMENT_IN_PLACE)
        former = ranks[0].lease
        ranks[0].open(client)
        assert ranks[0].lease != former
        with fails(rpc.Reason.LEASE_EXPIRED):
            client.submit(ranks[0].job_id, former, rank_manifest(0, 0))
        assert [m.server_id for m, _ in control_plane.coordinator.servers()] == [
            "train.rank-0",
            "train.rank-1",
        ]
        # The control plane knows the job: nothing has to be planned again.
        watchers = [rank.watch(client) for rank in ranks]
        for rank in ranks:
            rank.submit(client, 0)
        assert [w.next("step_planned").plan.manifest.step for w in watchers] == [0, 0]


def test_what_shows_no_right_to_come_back_is_refused(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client):
        ranks = open_pair(client)
        other = Rank(0, job_spec("other", n_ranks=1))
        other.open(client)

        stranger = Rank(0)
        stranger.job_id = ranks[0].job_id
        with fails(rpc.Reason.MISSING_TOKEN):
            client.jobs.OpenJob(
                jobs_pb2.OpenJobRequest(
                    spec=stranger.spec,
                    rank=0,
                    host="h",
                    resume=jobs_pb2.ResumeJob(job_id=ranks[0].job_id),
                ),
                metadata=[("unrelated", "value")],
            )
        for token in (ranks[1].token, other.token, b"x" * 36):
            stranger.token = token
            with fails(rpc.Reason.WRONG_TOKEN):
                stranger.open(client)

        # With the token of its own job under the name of another one.
        thief = Rank(0)
        thief.job_id, thief.token = other.job_id, other.token
        with fails(rpc.Reason.INVALID_REQUEST, rpc.Reason.SPEC_MISMATCH):
            thief.open(client)
        changed = Rank(0, job_spec(n_layers=9))
        changed.job_id, changed.token = ranks[0].job_id, ranks[0].token
        with fails(rpc.Reason.SPEC_MISMATCH):
            changed.open(client)


def test_rank_that_has_left_does_not_come_back(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client):
        ranks = open_pair(client)
        client.close_job(ranks[0].job_id, ranks[0].lease)
        with fails(rpc.Reason.ALREADY_EXISTS):
            ranks[0].open(client)


def test_report_of_a_step_from_before_counts_as_finishing_it(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client):
        ranks = open_pair(client)
    with started(tmp_path) as (_, client):
        client.register("s0")
        for rank in ranks:
            rank.open(client)
            client.report_rank(rank.job_id, rank.lease, 7, rank.rank)
        watcher = ranks[0].watch(client)
        events = {watcher.next().DESCRIPTOR.name for _ in range(2)}
        assert events == {"StepFinished", "Recover"}


def test_epoch_that_no_control_plane_gives_is_refused(tmp_path: Path) -> None:
    with started(tmp_path) as (_, client):
        ranks = open_pair(client)
        ranks[0].epoch = 2**63
        with fails(rpc.Reason.INVALID_REQUEST):
            ranks[0].open(client)
