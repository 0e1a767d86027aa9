"""A channel that changes its certificates: what happens to calls and streams that are under way."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from distca.contract import reloading_channel, rpc
from distca.contract.identity import Role
from distca.contract.tls import server_credentials
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from tests.control_plane.service_harness import eventually
from tests.security.pki import HOUR, Files, Pki

CHECK_SECONDS = 0.1


class Scripted(jobs_pb2_grpc.JobsServicer):
    """Unary calls wait until they are released; streams count from 0 until their client goes."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.certificates: list[bytes] = []
        self.streams = 0

    def DescribeJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.certificates.append(context.auth_context()["x509_pem_cert"][0])
        self.begun.set()
        assert self.release.wait(10)
        return jobs_pb2.DescribeJobResponse(planned_step=7)

    def WatchRank(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.streams += 1
        ended = threading.Event()
        context.add_callback(ended.set)
        number = 0
        while not ended.wait(0.01):
            number += 1
            yield jobs_pb2.PlanEvent(step_finished={"step": number, "job_id": str(self.streams)})


class Kit:
    """A server, a client's certificate and its channel."""

    def __init__(self, pki: Pki) -> None:
        self._pki = pki
        self.service = Scripted()
        self._server = grpc.server(futures.ThreadPoolExecutor(8))
        jobs_pb2_grpc.add_JobsServicer_to_server(self.service, self._server)
        tls = pki.issue(Role.CONTROL_PLANE).for_server()
        port = self._server.add_secure_port("127.0.0.1:0", server_credentials(tls))
        self._server.start()
        self.files: Files = pki.issue(Role.TRAINER, file="reloaded")
        self.channel = rpc.open_channel(
            rpc.RpcSettings(
                address=f"127.0.0.1:{port}",
                certificate_check_seconds=CHECK_SECONDS,
                **self.files.for_client(),
            )
        )
        self.jobs = jobs_pb2_grpc.JobsStub(self.channel)

    def renew(self) -> None:
        self._pki.issue(Role.TRAINER, file="reloaded", lifetime=2 * HOUR)

    def describe(self) -> Any:
        return self.jobs.DescribeJob(jobs_pb2.DescribeJobRequest())

    def close(self) -> None:
        self.service.release.set()
        self.channel.close()
        self._server.stop(None).wait(5)


@pytest.fixture
def kit(pki: Pki) -> Iterator[Kit]:
    made = Kit(pki)
    yield made
    made.close()


def in_use(kit: Kit) -> bool:
    """Whether the certificate on disk is the one that calls show."""
    kit.describe()
    return kit.service.certificates[-1] == kit.files.certificate_file.read_bytes()


def test_a_call_that_is_under_way_ends_on_the_old_channel(kit: Kit) -> None:
    with futures.ThreadPoolExecutor(1) as pool:
        slow = pool.submit(kit.describe)
        assert kit.service.begun.wait(10)
        kit.renew()
        # A future stays on the channel that it began on, too.
        later = kit.jobs.WatchRank(jobs_pb2.WatchRankRequest())
        next(later)
        eventually(lambda: kit.service.streams >= 2)  # it has moved, so the new channel is there
        assert not slow.done()
        kit.service.release.set()
        assert slow.result(10).planned_step == 7
        later.cancel()
    eventually(lambda: in_use(kit))


def test_a_stream_goes_on_though_the_server_never_ends_the_old_one(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading_channel, "STREAM_SECONDS", 0.3)
    kit.service.release.set()
    stream = kit.jobs.WatchRank(jobs_pb2.WatchRankRequest())
    read = [next(stream).step_finished.step for _ in range(3)]
    kit.renew()
    for _ in range(2000):  # twenty seconds at a hundred a second
        read.append(next(stream).step_finished.step)
        if read[-1] == 1:
            break
    old, new = read[:-1], read[-1]
    assert old == list(range(1, len(old) + 1)), "nothing of the old stream is lost or repeated"
    assert new == 1
    assert next(stream).step_finished.step == 2
    stream.cancel()
    with pytest.raises(rpc.Cancelled):
        list(stream)


def test_a_cancelled_stream_is_not_opened_again(kit: Kit) -> None:
    kit.service.release.set()
    stream = kit.jobs.WatchRank(jobs_pb2.WatchRankRequest())
    next(stream)
    stream.cancel()
    kit.renew()
    eventually(lambda: in_use(kit))
    assert kit.service.streams == 1


def test_several_renewals_in_a_row_end_with_the_last(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reloading_channel, "STREAM_SECONDS", 0.3)
    kit.service.release.set()
    stream = kit.jobs.WatchRank(jobs_pb2.WatchRankRequest())
    next(stream)
    for _ in range(3):
        kit.renew()
        eventually(lambda: (next(stream), in_use(kit))[1])
    stream.cancel()
