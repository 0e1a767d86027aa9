"""A tenant that asks for the name of another one's job while the control plane starts again: the
job goes on, the thief is refused or moved out by name, and learns nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from control_plane.server import ControlPlane
from control_plane.settings import AccessSettings
from core_attention.whole_file import write_whole
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import jobs_pb2
from tests.service.control_plane.test_resume import Rank
from tests.service.security.pki import Files, Pki, secure_client
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    TimedControlPlane,
    Watcher,
    job_spec,
    running,
)
from tests.support.waiting import eventually

NAME = "precious"
LEASE_SECONDS = 5.0
"""Jobs from before have two leases to come back to their names."""

Settings: TypeAlias = dict[str, Any]


class Tenants:
    """Certificates of two that do not trust one another."""

    def __init__(self, pki: Pki) -> None:
        self.tls = pki.issue(Role.CONTROL_PLANE).for_server()
        self.owner, self.thief = (pki.issue(Role.TRAINER, name) for name in ("owner", "thief"))


@pytest.fixture(scope="module")
def tenants(pki: Pki) -> Tenants:
    return Tenants(pki)


def secret(folder: Path) -> Settings:
    """What standbys in Kubernetes share: a secret, and no folder."""
    path = folder / "token-secret"
    write_whole(path, bytes(range(32)), mode=0o600)
    return {"access": AccessSettings(token_secret_file=path)}


class Runs:
    """A control plane that runs again and again, with the same secret.

    Args:
        settings: of each.
        stands_by: the next one runs beside the one before, and takes over when that ends.
    """

    def __init__(self, tenants: Tenants, settings: Settings, *, stands_by: bool) -> None:
        self._tls = tenants.tls
        self._settings = settings
        self._stands_by = stands_by
        self._running: list[ExitStack] = []

    def next(self) -> TimedControlPlane:
        """Ends the one before, and begins the next one, which then leads."""
        if not self._stands_by:
            self.close()
        stack = ExitStack()
        control_plane = stack.enter_context(
            running(
                tls=self._tls,
                coordinator={"lease_seconds": LEASE_SECONDS, "rejoin_seconds": 0.05},
                stands_by=self._stands_by,
                **self._settings,
            )
        )
        self.close()
        self._running.append(stack)
        eventually(lambda: control_plane._has_taken_over)
        return control_plane

    def close(self) -> None:
        while self._running:
            self._running.pop().close()


@pytest.fixture
def runs(request: pytest.FixtureRequest, tenants: Tenants, tmp_path: Path) -> Iterator[Runs]:
    with ExitStack() as stack:
        settings: Settings
        match request.param:
            case "token secret":
                settings = secret(tmp_path)
            case "state folder":
                settings = {"state_dir": tmp_path}
            case _:
                settings = {**secret(tmp_path), "leader_lock": tmp_path / "leader.lock"}
        made = Runs(tenants, settings, stands_by=len(settings) > 1)
        stack.callback(made.close)
        yield made


@contextmanager
def clients(control_plane: ControlPlane, *files: Files) -> Iterator[list[Client]]:
    with ExitStack() as stack:
        yield [stack.enter_context(secure_client(control_plane, each)) for each in files]


def spec(n_ranks: int) -> jobs_pb2.JobSpec:
    return job_spec(NAME, n_ranks=n_ranks, placement=jobs_pb2.PLACEMENT_IN_PLACE)


def opened(client: Client, *ranks: Rank) -> None:
    for rank in ranks:
        rank.open(client)
    assert len({rank.job_id for rank in ranks}) == 1


def has_lost(watcher: Watcher, job_id: str) -> None:
    assert watcher.next("job_closed").job_id == job_id


def calls_about(client: Client, rank: Rank) -> list[Callable[[], object]]:
    """What a rank may ask about its job."""
    job = {"job_id": rank.job_id}
    watch = jobs_pb2.WatchRankRequest(job_id=rank.job_id, rank_lease_id=rank.lease)
    return [
        lambda: client.jobs.DescribeJob(jobs_pb2.DescribeJobRequest(**job)),
        lambda: client.jobs.GetStep(jobs_pb2.GetStepRequest(**job, step=0)),
        lambda: next(client.jobs.WatchRank(iter([watch]))),
        lambda: client.close_job(rank.job_id, rank.lease, "mine"),
    ]


@pytest.mark.parametrize("runs", ["token secret", "state folder", "standby"], indirect=True)
def test_the_owners_job_goes_on_whatever_a_thief_tries(runs: Runs, tenants: Tenants) -> None:
    """When nobody has come back yet, and with the token of a job that it had under the name before;
    over several starts, in which the owner is late."""
    stale, ranks = Rank(0, spec(1)), [Rank(rank, spec(2)) for rank in (0, 1)]
    with clients(runs.next(), tenants.thief, tenants.owner) as (thief, owner):
        opened(thief, stale)
        thief.close_job(stale.job_id, stale.lease)
        opened(owner, *ranks)
    for comes_back in (False, True):
        with clients(runs.next(), tenants.thief, tenants.owner) as (thief, owner):
            stolen = stale if comes_back else Rank(0, spec(1))
            stolen.open(thief)
            watcher = stolen.watch(thief)
            ranks[0].open(owner)
            has_lost(watcher, stolen.job_id)
            with fails(rpc.Reason.UNKNOWN_JOB):
                stolen.open(thief)
    with clients(runs.next(), tenants.thief, tenants.owner) as (thief, owner):
        ranks[0].open(owner)
        with fails(rpc.Reason.OTHER_OWNER):
            Rank(0, spec(1)).open(thief)
        # Not even with the job's token, should it have leaked.
        thief.tokens.of[ranks[0].job_id] = ranks[0].token
        for attempt in calls_about(thief, ranks[0]):
            with fails(rpc.Reason.WRONG_TOKEN):
                attempt()
        ranks[1].open(owner)
        watchers = [rank.watch(owner) for rank in ranks]
        epoch = watchers[0].next("recover").epoch
        for rank in ranks:
            rank.submit(owner, 0)
            owner.report_progress(rank.job_id, rank.lease, epoch, {0: [0, 0]})
        for watcher in watchers:
            while watcher.next().DESCRIPTOR.name != "StepPlanned":
                pass


@pytest.mark.parametrize("runs", ["state folder"], indirect=True)
def test_a_thief_that_comes_after_the_owner_is_refused(runs: Runs, tenants: Tenants) -> None:
    stale, rank = Rank(0, spec(1)), Rank(0, spec(1))
    with clients(runs.next(), tenants.thief, tenants.owner) as (thief, owner):
        opened(thief, stale)
        thief.close_job(stale.job_id, stale.lease)
        opened(owner, rank)
    with clients(runs.next(), tenants.thief, tenants.owner) as (thief, owner):
        rank.open(owner)
        with fails(rpc.Reason.ALREADY_EXISTS):
            stale.open(thief)
        rank.submit(owner, 0)


@pytest.mark.parametrize("runs", ["state folder"], indirect=True)
def test_a_name_whose_job_stays_away_for_too_long_is_free(runs: Runs, tenants: Tenants) -> None:
    rank, newcomer = Rank(0, spec(1)), Rank(0, spec(1))
    with clients(runs.next(), tenants.owner) as (owner,):
        opened(owner, rank)
    second = runs.next()
    with clients(second, tenants.thief, tenants.owner) as (other, owner):
        opened(other, newcomer)
        for _ in range(5):
            newcomer.renew(other)
            second.pass_time(LEASE_SECONDS / 2)
        with fails(rpc.Reason.ALREADY_EXISTS):
            rank.open(owner)
    # Nor does it come back by one more start.
    with clients(runs.next(), tenants.thief, tenants.owner) as (other, owner):
        newcomer.open(other)
        with fails(rpc.Reason.ALREADY_EXISTS):
            rank.open(owner)
