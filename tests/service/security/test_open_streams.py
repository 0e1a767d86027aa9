"""Streams that take nothing, or end as soon as they have begun: what they cost others."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.jobs.subscriptions import MAX_STREAMS_OF_MEMBER
from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import jobs_pb2
from tests.service.security.pki import Files, Pki, control_plane_with, secure_client
from tests.support.errors import fails
from tests.support.http2 import Http2Client
from tests.support.service_harness import job_spec, rank_manifest, running
from tests.support.waiting import eventually

CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"
WATCH_RANK = "/distca.v1.Jobs/WatchRank"
CHURN_STREAMS, CHURN_AT_ONCE = 2000, 50

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def raw_client(address: str, files: Files, **settings: Any) -> Http2Client:
    return Http2Client(address, **files.for_client(), **settings)


def test_a_reader_that_takes_nothing_keeps_no_standby_from_leading(
    pki: Pki, tmp_path: Path
) -> None:
    tls = pki.issue(Role.CONTROL_PLANE).for_server()
    lock = tmp_path / "leader.lock"
    slow = pki.issue(Role.TRAINER, "slow")
    with ExitStack() as leading, ExitStack() as standing_by:
        leading.enter_context(running(tls=tls, leader_lock=lock))
        standby = standing_by.enter_context(running(tls=tls, leader_lock=lock, stands_by=True))
        with (
            raw_client(standby.address, slow, window_bytes=0) as reader,
            secure_client(standby, pki.issue(Role.READ_ONLY)) as other,
        ):
            assert reader.is_answered(reader.call(WATCH, b""))
            watch = health_pb2_grpc.HealthStub(other.channel).Watch(
                health_pb2.HealthCheckRequest(), timeout=20.0
            )
            assert next(watch).status == NOT_SERVING
            leading.close()
            assert next(watch).status == SERVING
            # Nor from ending.
            standing_by.close()
            assert next(watch).status == NOT_SERVING


def test_a_watcher_that_goes_leaves_the_others_theirs(pki: Pki) -> None:
    with ExitStack() as serving, ExitStack() as stack:
        control_plane = serving.enter_context(
            control_plane_with(pki.issue(Role.CONTROL_PLANE).for_server())
        )
        client = stack.enter_context(secure_client(control_plane, pki.issue(Role.READ_ONLY)))
        stub = health_pb2_grpc.HealthStub(client.channel)
        goes, stays = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=20.0) for _ in range(2))
        for watch in (goes, stays):
            assert next(watch).status == SERVING
        goes.cancel()
        with fails(rpc.Reason.CANCELLED):
            next(goes)
        serving.close()
        assert next(stays).status == NOT_SERVING


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[ControlPlane]:
    with control_plane_with(
        pki.issue(Role.CONTROL_PLANE).for_server(), coordinator={"lease_seconds": 60.0}
    ) as control_plane:
        yield control_plane


def test_streams_that_are_reset_as_soon_as_they_begin_disturb_nobody(
    control_plane: ControlPlane, pki: Pki
) -> None:
    churner = pki.issue(Role.TRAINER, "churner")
    with (
        secure_client(control_plane, churner) as client,
        secure_client(control_plane, pki.issue(Role.TRAINER, "calm")) as calm,
        secure_client(control_plane, pki.issue(Role.SERVER)) as server,
        raw_client(control_plane.address, churner) as raw,
    ):
        server.register("node-0")
        job, lease = client.open(0, job_spec("churned", n_ranks=1))
        request = jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease).SerializeToString()
        token = base64.b64encode(client.tokens.of[job])
        done = threading.Event()

        def churn() -> None:
            for _ in range(CHURN_STREAMS // CHURN_AT_ONCE):
                streams = [
                    raw.call(WATCH_RANK, request, distca_job_token_bin=token)
                    for _ in range(CHURN_AT_ONCE)
                ]
                # Some have begun by now; the server refuses calls while it has too many to end.
                while not raw.is_answered(raw.call(CHECK, b"")):
                    time.sleep(0.001)
                for stream in streams:
                    raw.reset(stream)
            done.set()

        watched, calm_lease = calm.open(0, job_spec("calm", n_ranks=1))
        watcher = calm.watch_rank(watched, calm_lease)
        watcher.next("job_opened")
        attack = threading.Thread(target=churn, daemon=True)
        attack.start()
        step = 0
        while attack.is_alive() or step < 3:
            calm.submit(watched, calm_lease, rank_manifest(step, 0))
            assert watcher.next("step_planned").plan.manifest.step == step
            step += 1
            attack.join(0.02)
        assert done.is_set(), "the attack broke off"
        # Of all those streams none is left.
        eventually(lambda: client.watching(control_plane, "rank") == 1)
        client.submit(job, lease, rank_manifest(0, 0))
        calm.close_job(watched, calm_lease, "done")


def test_streams_that_nobody_reads_are_few(control_plane: ControlPlane, pki: Pki) -> None:
    hoarder = pki.issue(Role.TRAINER, "hoarder")
    with (
        secure_client(control_plane, hoarder) as client,
        secure_client(control_plane, pki.issue(Role.SERVER, "other")) as server,
    ):
        server.register("node-1")
        job, lease = client.open(0, job_spec("hoard", n_ranks=1))
        request = jobs_pb2.WatchRankRequest(job_id=job, rank_lease_id=lease).SerializeToString()
        token = base64.b64encode(client.tokens.of[job])
        with raw_client(control_plane.address, hoarder, window_bytes=0) as raw:

            def hoard() -> None:
                stream = raw.call(WATCH_RANK, request, distca_job_token_bin=token)
                assert raw.is_answered(stream)

            def is_refused() -> bool:
                watcher = client.watch_rank(job, lease)
                try:
                    watcher.next()
                except rpc.RpcError as refused:
                    return refused.reason is rpc.Reason.BACKLOG
                watcher.cancel()
                # A stream that was replaced before it had begun to write has ended.
                hoard()
                return False

            for _ in range(MAX_STREAMS_OF_MEMBER):
                hoard()
            eventually(is_refused)
        # Its connection has ended, and with it its streams.

        def watches() -> bool:
            watcher = client.watch_rank(job, lease)
            try:
                watcher.next("job_opened")
            except rpc.RpcError:
                return False
            watcher.cancel()
            return True

        eventually(watches)
        client.close_job(job, lease)
