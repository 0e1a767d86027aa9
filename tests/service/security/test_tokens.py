"""A job's token is needed for everything about the job, and good for one rank of one job of one
tenant alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.contract.tokens import JOB_TOKEN_KEY, rank_token
from distca.v1 import jobs_pb2
from tests.service.security.pki import Pki, control_plane_with, refused, secure_client
from tests.support.errors import fails
from tests.support.service_harness import Client, client_of, job_spec, rank_manifest

Call = Callable[[Client, str, str, Any], Any]


def _with_token(token: bytes | None) -> dict[str, Any]:
    # Metadata of its own keeps the harness from adding the right token.
    return {"metadata": [(JOB_TOKEN_KEY, token)] if token is not None else [("no", "token")]}


CALLS: dict[str, Call] = {
    "Jobs/RenewRank": lambda client, job, lease, with_token: client.jobs.RenewRank(
        jobs_pb2.RenewRankRequest(job_id=job, rank_lease_id=lease), **with_token
    ),
    "Jobs/WatchRank": lambda client, job, lease, with_token: next(
        client.jobs.WatchRank(
            iter([jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease)]), **with_token
        )
    ),
    "Jobs/ReportStep": lambda client, job, lease, with_token: client.jobs.ReportStep(
        jobs_pb2.ReportStepRequest(job_id=job, lease_id=lease, rank=jobs_pb2.RankMeasurement()),
        **with_token,
    ),
    "Jobs/DescribeJob": lambda client, job, lease, with_token: client.jobs.DescribeJob(
        jobs_pb2.DescribeJobRequest(job_id=job), **with_token
    ),
    "Jobs/GetStep": lambda client, job, lease, with_token: client.jobs.GetStep(
        jobs_pb2.GetStepRequest(job_id=job), **with_token
    ),
    "Jobs/CloseJob": lambda client, job, lease, with_token: client.jobs.CloseJob(
        jobs_pb2.CloseJobRequest(job_id=job, rank_lease_id=lease), **with_token
    ),
}
OF_ONE_RANK = set(CALLS) - {"Jobs/DescribeJob", "Jobs/GetStep"}


class Tenants:
    """Two tenants, each with a job of two ranks."""

    def __init__(self, control_plane: ControlPlane, a: Client, b: Client) -> None:
        self.control_plane, self.a, self.b = control_plane, a, b
        self.job_a, self.lease_0 = a.open(0, job_spec("job-a"))
        _, self.lease_1 = a.open(1, job_spec("job-a"))
        self.job_b, self.lease_b = b.open(0, job_spec("job-b"))

    def token(self, lease: str) -> bytes:
        return (self.a.tokens.of | self.b.tokens.of)[lease]

    def close(self) -> None:
        self.a.close_job(self.job_a, self.lease_0)
        self.a.close_job(self.job_a, self.lease_1, "done")
        self.b.close_job(self.job_b, self.lease_b, "done")


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[ControlPlane]:
    tls = pki.issue(Role.CONTROL_PLANE).for_server()
    with control_plane_with(tls, coordinator={"lease_seconds": 60.0}) as control_plane:
        yield control_plane


@pytest.fixture(scope="module")
def tenants(control_plane: ControlPlane, pki: Pki) -> Iterator[Tenants]:
    with ExitStack() as stack:
        a, b = (
            stack.enter_context(secure_client(control_plane, pki.issue(Role.TRAINER, name)))
            for name in ("team-a", "team-b")
        )
        made = Tenants(control_plane, a, b)
        yield made
        made.close()


@pytest.mark.parametrize("method", CALLS)
def test_a_call_needs_the_token_of_its_job_its_tenant_and_its_rank(
    tenants: Tenants, method: str
) -> None:
    """Team b knows team a's job id and even a lease of it, has a token of its own, and has stolen
    one; a rank has the token of another."""
    wrong = rpc.Reason.WRONG_TOKEN
    own, stolen = (tenants.token(lease) for lease in (tenants.lease_b, tenants.lease_0))
    cases = [
        (tenants.a, tenants.lease_0, None, rpc.Reason.MISSING_TOKEN),
        (tenants.b, tenants.lease_0, own, wrong),
        (tenants.b, tenants.lease_0, stolen, wrong),
        *([(tenants.a, tenants.lease_1, stolen, wrong)] if method in OF_ONE_RANK else []),
    ]
    for client, lease, token, reason in cases:
        label = "missing-token" if token is None else "wrong-token"
        before = refused(tenants.control_plane, method, label)
        with fails(reason):
            CALLS[method](client, tenants.job_a, lease, _with_token(token))
        assert refused(tenants.control_plane, method, label) == before + 1


@pytest.mark.parametrize("forged", [b"", b"x", bytes(36), rank_token(bytes(32), 0)])
def test_a_made_up_token_is_denied(tenants: Tenants, forged: bytes) -> None:
    call = CALLS["Jobs/RenewRank"]
    with fails(rpc.Reason.WRONG_TOKEN):
        call(tenants.a, tenants.job_a, tenants.lease_0, _with_token(forged))


def test_a_job_is_joined_by_its_own_tenant_alone(tenants: Tenants) -> None:
    before = refused(tenants.control_plane, "Jobs/OpenJob", "other-owner")
    with fails(rpc.Reason.OTHER_OWNER):
        tenants.b.open(1, job_spec("job-a"))
    assert refused(tenants.control_plane, "Jobs/OpenJob", "other-owner") == before + 1


@pytest.mark.parametrize("method", CALLS)
def test_the_token_of_a_closed_job_opens_nothing(tenants: Tenants, method: str) -> None:
    spec = job_spec("brief", n_ranks=1)
    closed, lease = tenants.a.open(0, spec)
    old = _with_token(tenants.token(lease))
    tenants.a.close_job(closed, lease)
    with fails(rpc.Reason.UNKNOWN_JOB):
        CALLS[method](tenants.a, closed, lease, old)
    again, new_lease = tenants.a.open(0, spec)
    with fails(rpc.Reason.WRONG_TOKEN):
        CALLS[method](tenants.a, again, new_lease, old)
    tenants.a.close_job(again, new_lease)


def test_operators_and_readers_see_a_job_without_its_token_and_without_addresses(
    control_plane: ControlPlane, pki: Pki
) -> None:
    with ExitStack() as stack:
        clients = {
            role: stack.enter_context(secure_client(control_plane, pki.issue(role)))
            for role in (Role.TRAINER, Role.SERVER, Role.OPERATOR, Role.READ_ONLY)
        }
        trainer = clients[Role.TRAINER]
        server_lease = clients[Role.SERVER].register("pool-0")
        job_id, lease = trainer.open(0, job_spec("seen", n_ranks=1))
        trainer.submit(job_id, lease, rank_manifest(0, 0))
        watcher = trainer.watch_rank(job_id, lease)
        watcher.next("job_opened")
        watcher.next("step_planned")
        request = jobs_pb2.GetStepRequest(job_id=job_id, step=0)
        addresses = {
            role: {s.data_address for s in clients[role].jobs.GetStep(request).plan.servers}
            for role in (Role.TRAINER, Role.OPERATOR, Role.READ_ONLY)
        }
        assert addresses == {
            Role.TRAINER: {"127.0.0.1:9000"},
            Role.OPERATOR: {"127.0.0.1:9000"},
            Role.READ_ONLY: {""},
        }
        watcher.cancel()
        trainer.close_job(job_id, lease)
        clients[Role.SERVER].heartbeat(server_lease)


def test_keys_go_to_servers_and_not_to_ranks_without_one(
    control_plane: ControlPlane, pki: Pki
) -> None:
    with ExitStack() as stack:
        server, trainer = (
            stack.enter_context(secure_client(control_plane, pki.issue(role)))
            for role in (Role.SERVER, Role.TRAINER)
        )
        at_server = server.watch_server(server.register("keyed"))
        for placement, rank_has_key in (
            (jobs_pb2.PLACEMENT_POOL, False),
            (jobs_pb2.PLACEMENT_IN_PLACE, True),
        ):
            job_id, lease = trainer.open(0, job_spec("keys", n_ranks=1, placement=placement))
            watcher = trainer.watch_rank(job_id, lease)
            assert bool(watcher.next("job_opened").verification_key) is rank_has_key
            watcher.cancel()
            trainer.close_job(job_id, lease)
        assert at_server.next("job_opened").verification_key
        at_server.cancel()


def test_tokens_are_checked_without_certificates_too() -> None:
    with (
        control_plane_with(None) as control_plane,
        client_of(control_plane.address) as client,
    ):
        job_id, lease = client.open(0)
        with fails(rpc.Reason.MISSING_TOKEN):
            CALLS["Jobs/RenewRank"](client, job_id, lease, _with_token(None))
        with fails(rpc.Reason.WRONG_TOKEN):
            CALLS["Jobs/DescribeJob"](client, job_id, lease, _with_token(b"forged"))
