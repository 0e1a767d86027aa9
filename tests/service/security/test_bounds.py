"""What one caller can make the control plane hold is bounded, and costs nobody else anything."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.server import ControlPlane
from control_plane.settings import CoordinatorSettings
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2
from tests.service.security.pki import Pki, control_plane_with, refused, secure_client
from tests.support.errors import fails
from tests.support.service_harness import (
    Client,
    job_spec,
    rank_manifest,
    server_description,
)
from tests.support.waiting import eventually

NASTY = (
    "node\nINFO all is well",
    "\x1b[2J\x1b[31mgone",
    "\u202eyllaer",
    "a\x00b",
    "x" * 1000,
)
"""Names that a terminal or a log would obey, and one that fills them."""

MAX_JOBS = 3
MAX_RANKS = 16
MAX_MANIFEST_BYTES = 20_000
MAX_CALLS = 12


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[ControlPlane]:
    with control_plane_with(
        pki.issue(Role.CONTROL_PLANE).for_server(),
        coordinator={
            "lease_seconds": 60.0,
            "max_jobs_per_identity": MAX_JOBS,
            "max_ranks_per_identity": MAX_RANKS,
            "max_manifest_bytes_per_identity": MAX_MANIFEST_BYTES,
        },
        max_calls_per_identity=MAX_CALLS,
    ) as control_plane:
        yield control_plane


@pytest.fixture
def tenants(control_plane: ControlPlane, pki: Pki) -> Iterator[tuple[Client, Client]]:
    """A tenant that wants everything, and one that trains."""
    with ExitStack() as stack:
        greedy, calm = (
            stack.enter_context(secure_client(control_plane, pki.issue(Role.TRAINER, name)))
            for name in ("greedy", "calm")
        )
        yield greedy, calm


def test_a_tenant_opens_so_many_jobs_and_another_one_opens_its_own(
    control_plane: ControlPlane, tenants: tuple[Client, Client]
) -> None:
    greedy, calm = tenants
    opened = [greedy.open(0, job_spec(f"many-{index}")) for index in range(MAX_JOBS)]
    before = refused(control_plane, "Jobs/OpenJob", "quota")
    for _ in range(20):
        with fails(rpc.Reason.QUOTA):
            greedy.open(0, job_spec("one-more"))
    assert refused(control_plane, "Jobs/OpenJob", "quota") == before + 20
    # Ranks of the jobs that are open still join, and so do others' jobs.
    greedy.open(1, job_spec("many-0"))
    job, lease = calm.open(0, job_spec("calm"))
    calm.close_job(job, lease, "done")
    for job, lease in opened:
        greedy.close_job(job, lease, "done")
    job, lease = greedy.open(0, job_spec("one-more"))
    greedy.close_job(job, lease, "done")


def test_ranks_of_all_jobs_of_a_tenant_are_bounded(
    control_plane: ControlPlane, tenants: tuple[Client, Client]
) -> None:
    greedy, calm = tenants
    with fails(rpc.Reason.QUOTA):
        greedy.open(0, job_spec("wide", n_ranks=MAX_RANKS + 1))
    job, lease = greedy.open(0, job_spec("half", n_ranks=MAX_RANKS - 1))
    with fails(rpc.Reason.QUOTA):
        greedy.open(0, job_spec("other", n_ranks=2))
    for client, (name, n_ranks) in ((greedy, ("last", 1)), (calm, ("calm", MAX_RANKS))):
        opened, its_lease = client.open(0, job_spec(name, n_ranks=n_ranks))
        client.close_job(opened, its_lease, "done")
    greedy.close_job(job, lease, "done")


def test_streams_of_a_tenant_are_bounded(
    control_plane: ControlPlane, tenants: tuple[Client, Client]
) -> None:
    greedy, calm = tenants
    before = refused(control_plane, "other", "quota") + refused(
        control_plane, "Health/Watch", "quota"
    )
    streams = [
        health_pb2_grpc.HealthStub(greedy.channel).Watch(health_pb2.HealthCheckRequest())
        for _ in range(2 * MAX_CALLS)
    ]
    eventually(
        lambda: (
            refused(control_plane, "other", "quota")
            + refused(control_plane, "Health/Watch", "quota")
            >= before + MAX_CALLS
        )
    )
    with fails(rpc.Reason.QUOTA):
        greedy.open(0, job_spec("greedy"))
    job, lease = calm.open(0, job_spec("calm"))
    calm.close_job(job, lease, "done")
    for stream in streams:
        stream.cancel()

    def opens() -> bool:
        try:
            job, lease = greedy.open(0, job_spec("greedy"))
        except rpc.RpcError:
            return False
        greedy.close_job(job, lease, "done")
        return True

    eventually(opens)


def test_steps_that_a_rank_gives_up_are_bounded(tenants: tuple[Client, Client]) -> None:
    _, calm = tenants
    job, lease = calm.open(0, job_spec("fickle"))

    def give_up(step: int) -> None:
        calm.jobs.ReportStep(
            jobs_pb2.ReportStepRequest(
                job_id=job,
                lease_id=lease,
                step=step,
                given_up=jobs_pb2.StepGivenUp(reason="not finite"),
            )
        )

    most = CoordinatorSettings.max_pending_steps
    for step in range(most):
        give_up(step)
    with fails(rpc.Reason.BACKLOG):
        give_up(most)
    calm.close_job(job, lease, "done")


def test_manifests_of_a_tenant_are_bounded_over_all_its_jobs(
    control_plane: ControlPlane, tenants: tuple[Client, Client]
) -> None:
    greedy, calm = tenants
    jobs = [greedy.open(0, job_spec(f"wide-{index}")) for index in range(MAX_JOBS)]
    step = 0
    while control_plane.coordinator.manifest_bytes("greedy") < MAX_MANIFEST_BYTES - 2000:
        for job, lease in jobs:
            greedy.submit(job, lease, rank_manifest(step, 0))
        step += 1
    assert step > 1
    large = rank_manifest(step, 0, lengths=[[1] * 500, [500]])
    with fails(rpc.Reason.QUOTA):
        greedy.submit(*jobs[0], large)
    assert refused(control_plane, "Jobs/WatchRank", "quota") >= 1
    job, lease = calm.open(0, job_spec("calm"))
    calm.submit(job, lease, rank_manifest(0, 0))
    calm.close_job(job, lease, "done")
    for job, lease in jobs:
        greedy.close_job(job, lease, "done")
    # What was kept has gone with the jobs.
    job, lease = greedy.open(0, job_spec("again"))
    greedy.submit(job, lease, rank_manifest(0, 0))
    greedy.close_job(job, lease, "done")


@pytest.mark.parametrize("name", [*NASTY, ""])
def test_names_that_would_be_obeyed_are_refused(
    control_plane: ControlPlane, pki: Pki, tenants: tuple[Client, Client], name: str
) -> None:
    def register(**values: str) -> None:
        server_id = values.pop("server_id", "nasty")
        server = server_description(server_id, **values)
        client.membership.RegisterServer(membership_pb2.RegisterServerRequest(server=server))

    def open_job(host: str = "host-0", **fields: str) -> None:
        spec = job_spec(**fields)
        tenants[0].jobs.OpenJob(jobs_pb2.OpenJobRequest(spec=spec, rank=0, host=host))

    with secure_client(control_plane, pki.issue(Role.SERVER, "nasty")) as client:
        for call, fields, may_be_empty in (
            (register, ("server_id", "host", "device"), ("version",)),
            (open_job, ("name", "host"), ("planner", "transport")),
        ):
            for field in (*fields, *(may_be_empty if name else ())):
                with fails(rpc.Reason.INVALID_REQUEST) as caught:
                    call(**{field: name})
                assert str(caught.value).isprintable(), field


def test_reasons_are_told_on_one_line(tenants: tuple[Client, Client]) -> None:
    _, calm = tenants
    job, lease = calm.open(0, job_spec("reasons"))
    _, other = calm.open(1, job_spec("reasons"))
    watcher = calm.watch_rank(job, other)
    watcher.next("job_opened")
    calm.close_job(job, lease, "broken\n\x1b[31mCRITICAL " + "x" * 5000)
    told = watcher.next("job_closed").error
    assert told.isprintable()
    assert "broken\\n\\x1b[31mCRITICAL" in told
    assert len(told) < 1200


def test_an_in_place_server_has_its_ranks_name(tenants: tuple[Client, Client]) -> None:
    """Else a job could take the name of a pool server that is about to start."""
    request = jobs_pb2.OpenJobRequest(
        spec=job_spec("thief", placement=jobs_pb2.PLACEMENT_IN_PLACE),
        rank=0,
        host="h",
        in_place_server=server_description("node-0"),
    )
    with fails(rpc.Reason.INVALID_REQUEST):
        tenants[0].jobs.OpenJob(request)


def test_connections_that_say_nothing_are_closed(monkeypatch: pytest.MonkeyPatch, pki: Pki) -> None:
    monkeypatch.setattr(rpc, "SERVER_HANDSHAKE_SECONDS", 1.0)
    with control_plane_with(pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane:
        host, _, port = control_plane.address.rpartition(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(50)]
        for connection in silent[::2]:
            connection.sendall(b"\x16\x03\x01\x02\x00")  # a TLS record that never ends
        deadline = time.monotonic() + 15.0
        for connection in silent:
            connection.settimeout(max(deadline - time.monotonic(), 0.1))
            assert connection.recv(1) == b""
            connection.close()


def test_strangers_that_hold_all_connections_disturb_nobody_who_is_connected(
    monkeypatch: pytest.MonkeyPatch, pki: Pki
) -> None:
    monkeypatch.setattr(rpc, "SERVER_HANDSHAKE_SECONDS", 3.0)
    monkeypatch.setattr(rpc, "max_connections", lambda: 16)
    with (
        control_plane_with(pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane,
        secure_client(control_plane, pki.issue(Role.TRAINER, "early")) as early,
    ):
        job, lease = early.open(0, job_spec("early"))
        host, _, port = control_plane.address.rpartition(":")
        strangers = [socket.create_connection((host, int(port))) for _ in range(100)]
        for step in range(10):
            early.submit(job, lease, rank_manifest(step, 0))
        # Their time is over, and others come in again.
        with secure_client(
            control_plane, pki.issue(Role.OPERATOR, "late"), call_seconds=20.0
        ) as late:
            listed = late.cluster.DescribeCluster(
                cluster_pb2.DescribeClusterRequest(), wait_for_ready=True
            )
            assert len(listed.servers) == 0
        for stranger in strangers:
            stranger.close()
