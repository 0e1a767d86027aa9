"""How clients reach the control plane: settings, deadlines, and errors with names."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest

from distca.contract import rpc
from distca.contract.rpc import RpcSettings, open_channel, server_options, wait_until_ready
from distca.contract.rpc_errors import ERROR_KIND_KEY, Reason
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from tests.support.errors import fails

Behave = Callable[[grpc.ServicerContext], object]


class Scripted(jobs_pb2_grpc.JobsServicer):
    """Does in every call what the test says."""

    behave: Behave = staticmethod(lambda context: None)

    def DescribeJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.behave(context)
        return jobs_pb2.DescribeJobResponse()

    def WatchRank(self, request: Any, context: Any) -> Any:  # noqa: N802
        yield jobs_pb2.PlanEvent()
        self.behave(context)


@pytest.fixture
def scripted() -> Iterator[tuple[Scripted, str]]:
    service = Scripted()
    server = grpc.server(futures.ThreadPoolExecutor(4), options=server_options(2**20))
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield service, f"127.0.0.1:{port}"
    server.stop(None).wait(5)


def describe(address: str, **settings: Any) -> Any:
    with open_channel(RpcSettings(address=address, **settings)) as channel:
        return jobs_pb2_grpc.JobsStub(channel).DescribeJob(jobs_pb2.DescribeJobRequest())


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, None, Reason.INVALID_REQUEST),
        (grpc.StatusCode.FAILED_PRECONDITION, None, Reason.SPEC_MISMATCH),
        (grpc.StatusCode.ALREADY_EXISTS, None, Reason.ALREADY_EXISTS),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, None, Reason.TOO_LARGE),
        (grpc.StatusCode.UNAVAILABLE, None, Reason.UNAVAILABLE),
        (grpc.StatusCode.DEADLINE_EXCEEDED, None, Reason.DEADLINE_EXCEEDED),
        (grpc.StatusCode.CANCELLED, None, Reason.CANCELLED),
        (grpc.StatusCode.INTERNAL, None, Reason.OTHER),
        (grpc.StatusCode.PERMISSION_DENIED, None, Reason.WRONG_ROLE),
        (grpc.StatusCode.PERMISSION_DENIED, "wrong-token", Reason.WRONG_TOKEN),
        (grpc.StatusCode.NOT_FOUND, None, Reason.NOT_FOUND),
        (grpc.StatusCode.NOT_FOUND, "other", Reason.NOT_FOUND),
        (grpc.StatusCode.NOT_FOUND, "wrong-token", Reason.NOT_FOUND),
        (grpc.StatusCode.NOT_FOUND, "unknown-job", Reason.UNKNOWN_JOB),
        (grpc.StatusCode.NOT_FOUND, "unknown-server", Reason.UNKNOWN_SERVER),
        (grpc.StatusCode.NOT_FOUND, "unknown-step", Reason.UNKNOWN_STEP),
        (grpc.StatusCode.NOT_FOUND, "lease-expired", Reason.LEASE_EXPIRED),
    ],
)
def test_every_status_has_an_error_that_names_method_address_and_what_to_do(
    scripted: tuple[Scripted, str],
    status: grpc.StatusCode,
    kind: str | None,
    expected: Reason,
) -> None:
    service, address = scripted

    def behave(context: grpc.ServicerContext) -> None:
        if kind is not None:
            context.set_trailing_metadata(((ERROR_KIND_KEY, kind),))
        context.abort(status, "the server's words")

    service.behave = behave
    with pytest.raises(rpc.RpcError) as caught:
        describe(address)
    assert caught.value.reason is expected
    assert str(caught.value) == (f"DescribeJob at {address}: the server's words; {expected.advice}")
    with open_channel(RpcSettings(address=address)) as channel:
        stream = jobs_pb2_grpc.JobsStub(channel).WatchRank(iter([jobs_pb2.WatchRankRequest()]))
        next(stream)
        with pytest.raises(rpc.RpcError) as caught:
            next(stream)
    assert caught.value.reason is expected
    assert caught.value.method == "WatchRank"


def test_call_without_a_timeout_has_the_settings_deadline(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    release = threading.Event()
    service.behave = lambda context: release.wait(10)
    begin = time.monotonic()
    with fails(rpc.Reason.DEADLINE_EXCEEDED):
        describe(address, call_seconds=0.2)
    # Far below the ten seconds that the server would take.
    assert time.monotonic() - begin < 5
    release.set()


def test_cancelled_stream_frees_its_reader(scripted: tuple[Scripted, str]) -> None:
    service, address = scripted
    release = threading.Event()
    service.behave = lambda context: release.wait(10)
    with open_channel(RpcSettings(address=address)) as channel:
        stream = jobs_pb2_grpc.JobsStub(channel).WatchRank(iter([jobs_pb2.WatchRankRequest()]))
        next(stream)
        threading.Timer(0.1, stream.cancel).start()
        with fails(rpc.Reason.CANCELLED):
            next(stream)
    release.set()


def test_no_server_is_a_named_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    with fails(rpc.Reason.UNAVAILABLE) as failed:
        describe(address)
    assert getattr(failed.value, "address", None) == address
    settings = RpcSettings(address=address, connect_seconds=0.2)
    with open_channel(settings) as channel, fails(rpc.Reason.UNAVAILABLE):
        wait_until_ready(channel, settings)


@pytest.mark.parametrize(
    "changes",
    [
        {"address": "localhost"},
        {"address": ":7700"},
        {"address": "h:0"},
        {"call_seconds": 0.0},
        {"connect_seconds": float("nan")},
        {"keepalive_seconds": 5.0},
        {"max_message_bytes": 0},
        {"certificate_file": Path("c")},
        {"certificate_file": Path("c"), "key_file": Path("k")},
    ],
)
def test_wrong_settings_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        RpcSettings(**({"address": "h:1"} | changes))


@pytest.mark.parametrize("permitting", [True, False])
def test_idle_stream_lives_on_pings_that_the_server_permits(
    monkeypatch: pytest.MonkeyPatch, permitting: bool
) -> None:
    """At one ping a second, the fastest that gRPC's client goes, and the third is one too many for
    a server with gRPC's own options, which shows that the test would notice."""
    monkeypatch.setattr(rpc, "MIN_KEEPALIVE_SECONDS", 1.0)
    service, release = Scripted(), threading.Event()
    service.behave = lambda context: release.wait(5.0)
    server = grpc.server(
        futures.ThreadPoolExecutor(2), options=server_options(2**20) if permitting else []
    )
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    settings = RpcSettings(address=f"127.0.0.1:{port}", keepalive_seconds=1.0)
    with open_channel(settings) as channel:
        stream = jobs_pb2_grpc.JobsStub(channel).WatchRank(iter([jobs_pb2.WatchRankRequest()]))
        if permitting:
            assert len(list(stream)) == 1
        else:
            with fails(rpc.Reason.UNAVAILABLE):
                list(stream)
    release.set()
    server.stop(None).wait(5)
