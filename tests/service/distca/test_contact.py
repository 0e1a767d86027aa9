"""One contact with a control plane, ended by one thread while others make calls."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from distca.contract import rpc
from distca.contract.contact import Contact
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from tests.support.errors import fails

WAIT_SECONDS = 10.0
REQUEST = jobs_pb2.DescribeJobRequest()


class Jobs(jobs_pb2_grpc.JobsServicer):
    """Answers at once, or as soon as it is released."""

    def __init__(self) -> None:
        self.begun, self.release = threading.Event(), threading.Event()
        self.release.set()

    def DescribeJob(self, request: Any, context: Any) -> Any:  # noqa: N802
        self.begun.set()
        assert self.release.wait(WAIT_SECONDS)
        return jobs_pb2.DescribeJobResponse(planned_step=7)


@pytest.fixture
def jobs() -> Jobs:
    return Jobs()


@pytest.fixture
def contact(jobs: Jobs) -> Iterator[Contact]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    jobs_pb2_grpc.add_JobsServicer_to_server(jobs, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = Contact(rpc.RpcSettings(address=f"127.0.0.1:{port}"))
    try:
        yield made
    finally:
        made.end()
        jobs.release.set()
        server.stop(None).wait(WAIT_SECONDS)


def describe(contact: Contact) -> int:
    return int(contact.call(contact._jobs.DescribeJob, REQUEST).planned_step)


def test_calls_under_way_end_with_the_contact(contact: Contact, jobs: Jobs) -> None:
    jobs.release.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(describe, contact)
        assert jobs.begun.wait(WAIT_SECONDS)
        began = time.monotonic()
        contact.end()
        ended = waiting.exception(WAIT_SECONDS)
        assert isinstance(ended, rpc.RpcError)
        assert ended.reason is rpc.Reason.CANCELLED
        assert time.monotonic() - began < WAIT_SECONDS / 2


def test_no_call_begins_on_a_contact_that_has_ended(contact: Contact) -> None:
    assert describe(contact) == 7
    contact.end()
    contact.end()
    with fails(rpc.Reason.CANCELLED):
        describe(contact)


def test_the_channel_is_closed_after_the_last_call_and_by_one_thread(contact: Contact) -> None:
    """Whatever the order: while threads make calls, another ends the contact."""
    closed: list[int] = []
    close, in_calls = contact._channel.close, threading.Barrier(5)

    def close_once() -> None:
        closed.append(len(contact._under_way))
        close()

    contact._channel.close = close_once

    def call_until_it_ends() -> rpc.Reason:
        in_calls.wait()
        while True:
            try:
                assert describe(contact) == 7
            except rpc.RpcError as error:
                return error.reason

    with ThreadPoolExecutor(4) as pool:
        callers = [pool.submit(call_until_it_ends) for _ in range(4)]
        in_calls.wait()
        time.sleep(0.02)
        contact.end()
        for caller in callers:
            assert caller.result(WAIT_SECONDS) is rpc.Reason.CANCELLED
    assert closed == [0]
