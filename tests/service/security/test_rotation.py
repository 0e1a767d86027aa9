"""Certificates that are replaced on disk come into use while members work."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import grpc
import pytest

from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.contact import Contact
from distca.contract.identity import Role
from distca.contract.rotation import Rotation
from distca.contract.tls import server_credentials
from distca.v1 import jobs_pb2, jobs_pb2_grpc
from tests.service.attention_node.test_pool_link import Node
from tests.service.distca.test_contact import Jobs
from tests.service.security.pki import HOUR, Files, Mounted, Pki, control_plane_with, ends
from tests.support.errors import fails
from tests.support.waiting import eventually

CHECK_SECONDS = 0.1
WAIT_SECONDS = 10.0


def settings(address: str, files: Files) -> rpc.RpcSettings:
    return rpc.RpcSettings(
        address=address,
        call_seconds=5.0,
        connect_seconds=0.5,
        certificate_check_seconds=CHECK_SECONDS,
        **files.for_client(),
    )


@contextmanager
def node_of(control_plane: ControlPlane, files: Files) -> Iterator[Node]:
    node = Node(settings(control_plane.address, files), "s0")
    node.membership.join()
    try:
        yield node
    finally:
        node.membership.leave()


@pytest.fixture
def mounts(tmp_path: Path, pki: Pki) -> dict[Role, Mounted]:
    return {
        role: Mounted(tmp_path / role, pki.issue(role, "rotated"))
        for role in (Role.CONTROL_PLANE, Role.SERVER, Role.TRAINER)
    }


@pytest.fixture
def control_plane(mounts: dict[Role, Mounted]) -> Iterator[ControlPlane]:
    with control_plane_with(
        mounts[Role.CONTROL_PLANE].files.for_server(), coordinator={"lease_seconds": 60.0}
    ) as control_plane:
        yield control_plane


def connected_with(caplog: pytest.LogCaptureFixture, role: Role, end: datetime) -> bool:
    """Whether the control plane has seen this certificate."""
    return any(
        message.startswith(f"spiffe://distca/{role}/rotated connected")
        and message.endswith(f"certificate good until {end.isoformat()}")
        for message in caplog.messages
    )


def test_certificates_that_are_not_accepted_change_nothing(
    control_plane: ControlPlane,
    mounts: dict[Role, Mounted],
    pki: Pki,
    foreign_pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    mount = mounts[Role.SERVER]
    with node_of(control_plane, mount.files) as node:
        mount.put(pki.ca_file.read_bytes(), foreign_pki.issue(Role.SERVER, "rotated"))
        eventually(lambda: "no connection with the new certificates" in caplog.text)
        # Corrected, they come into use.
        end = mount.put(
            pki.ca_file.read_bytes(), pki.issue(Role.SERVER, "rotated", lifetime=2 * HOUR)
        )
        eventually(lambda: connected_with(caplog, Role.SERVER, end))
        assert node.told == ["registered"]
    assert caplog.text.count("no connection with the new certificates") == 1


def test_half_written_files_are_left_alone(
    control_plane: ControlPlane,
    pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not everybody swaps folders: a certificate may be there before its key. A contact that is
    lost meanwhile is made again with what was there before."""
    caplog.set_level(logging.INFO)
    files = pki.issue(Role.SERVER, "rotated", file="written")
    with node_of(control_plane, files) as node:
        following = pki.issue(Role.SERVER, "rotated", file="following", lifetime=2 * HOUR)
        files.certificate_file.write_bytes(following.certificate_file.read_bytes())
        eventually(lambda: "is another certificate's" in caplog.text)
        lifeline = node.membership._lifeline
        lifeline.let_go(
            lifeline.present(),
            rpc.RpcError(rpc.Reason.CANCELLED, "a call", "here", "the test says so"),
        )
        eventually(lambda: "back at the control plane" in caplog.text)
        assert not connected_with(caplog, Role.SERVER, ends(following.certificate_file))
        files.key_file.write_bytes(following.key_file.read_bytes())
        eventually(lambda: connected_with(caplog, Role.SERVER, ends(following.certificate_file)))
        assert node.told == ["registered"]


def test_several_renewals_in_a_row_end_with_the_last(
    control_plane: ControlPlane,
    pki: Pki,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    files = pki.issue(Role.SERVER, "rotated", file="repeated")
    with node_of(control_plane, files):
        for hours in (2, 3, 4):
            pki.issue(Role.SERVER, "rotated", file="repeated", lifetime=hours * HOUR)
        last = functools.partial(connected_with, caplog, Role.SERVER, ends(files.certificate_file))
        eventually(last)


def test_a_call_that_is_under_way_ends_on_the_contact_that_it_began_on(pki: Pki) -> None:
    service = Jobs()
    service.release.clear()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    jobs_pb2_grpc.add_JobsServicer_to_server(service, server)
    tls = pki.issue(Role.CONTROL_PLANE).for_server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(tls))
    server.start()
    files = pki.issue(Role.TRAINER, file="under-way")
    reached = settings(f"127.0.0.1:{port}", files).following_files()
    contact, rotation = Contact(reached), Rotation(reached)
    request = jobs_pb2.DescribeJobRequest()
    try:
        with futures.ThreadPoolExecutor(1) as pool:
            slow = pool.submit(contact.call, contact._jobs.DescribeJob, request)
            assert service.begun.wait(WAIT_SECONDS)
            assert not rotation.is_due(reached)
            pki.issue(Role.TRAINER, file="under-way", lifetime=2 * HOUR)
            assert rotation.is_due(reached)
            assert not rotation.is_due(reached)
            contact.retire()
            assert not slow.done()
            service.release.set()
            assert slow.result(WAIT_SECONDS).planned_step == 7
        with fails(rpc.Reason.CANCELLED):
            contact.call(contact._jobs.DescribeJob, request)
    finally:
        service.release.set()
        contact.end()
        server.stop(None).wait(WAIT_SECONDS)


def test_the_control_plane_starts_with_no_half_pair(pki: Pki, tmp_path: Path) -> None:
    files, other = pki.issue(Role.CONTROL_PLANE), pki.issue(Role.OPERATOR)
    wrong = Files(files.ca_file, files.certificate_file, other.key_file)
    with (
        pytest.raises(ValueError),
        control_plane_with(wrong.for_server()),
    ):
        pass
    with pytest.raises(ValueError):
        rpc.open_channel(rpc.RpcSettings(address="localhost:1", ca_file=files.key_file))
