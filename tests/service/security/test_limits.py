"""Requests that are too large, too many or nonsense are refused by name and counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from control_plane.access.access_policy import POLICIES
from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.contract.rpc import RpcSettings, open_channel
from tests.service.security.pki import Files, Pki, control_plane_with, refused, secure_client
from tests.service.trainer_client.talking_rank import TalkingRank
from tests.support.errors import fails
from tests.support.service_harness import TimedControlPlane, job_spec


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[TimedControlPlane]:
    with control_plane_with(
        pki.issue(Role.CONTROL_PLANE).for_server(),
        coordinator={"max_pending_steps": 2, "lease_seconds": 60.0},
        registrations_per_second=2.0,
        registration_burst=4,
    ) as control_plane:
        yield control_plane


@pytest.mark.parametrize(
    ("role", "method"),
    [
        (Role.SERVER, "/distca.v1.Membership/Heartbeat"),
        (Role.SERVER, "/distca.v1.Membership/RegisterServer"),
        (Role.TRAINER, "/distca.v1.Jobs/ReportStep"),
        (Role.TRAINER, "/distca.v1.Jobs/OpenJob"),
    ],
)
def test_a_request_that_is_too_large_is_refused_unread(
    control_plane: ControlPlane, pki: Pki, role: Role, method: str
) -> None:
    limit = POLICIES[method].max_request_bytes
    short = method.rpartition(".")[2]
    before = refused(control_plane, short, "too-large")
    with secure_client(control_plane, pki.issue(role, "large")) as client:
        call = client.channel.unary_unary(method)
        with fails(rpc.Reason.TOO_LARGE):
            call(bytes(limit + 1))
    assert refused(control_plane, short, "too-large") == before + 1


def test_a_request_beyond_grpcs_own_limit_is_refused(control_plane: ControlPlane, pki: Pki) -> None:
    """By gRPC, before it is in memory, and so not counted."""
    settings = RpcSettings(
        address=control_plane.address,
        max_message_bytes=2**30,
        **pki.issue(Role.TRAINER, "huge").for_client(),
    )
    with open_channel(settings) as channel:
        call = channel.unary_unary("/distca.v1.Jobs/OpenJob")
        with fails(rpc.Reason.TOO_LARGE):
            call(bytes(rpc.DEFAULT_MAX_MESSAGE_BYTES + 1), timeout=30.0)


def test_nonsense_is_an_invalid_request(control_plane: ControlPlane, pki: Pki) -> None:
    before = refused(control_plane, "Membership/Heartbeat", "invalid-request")
    with secure_client(control_plane, pki.issue(Role.SERVER)) as client:
        call = client.channel.unary_unary("/distca.v1.Membership/Heartbeat")
        with fails(rpc.Reason.INVALID_REQUEST):
            call(b"\xff\xff\xff")
    assert refused(control_plane, "Membership/Heartbeat", "invalid-request") == before + 1


def register(control_plane: ControlPlane, files: Files, indices: range) -> rpc.RpcError | None:
    """Registers servers; the refusal that stopped it, or None."""
    with secure_client(control_plane, files) as client:
        for index in indices:
            try:
                client.register(f"{files.certificate_file.stem}-{index}")
            except rpc.RpcError as refusal:
                return refusal
    return None


def test_registering_too_fast_is_refused_until_the_time_that_is_told(
    control_plane: TimedControlPlane, pki: Pki
) -> None:
    files = pki.issue(Role.SERVER, "eager")
    before = refused(control_plane, "Membership/RegisterServer", "rate-limited")
    refusal = register(control_plane, files, range(20))
    assert refusal is not None
    assert refusal.reason is rpc.Reason.RATE_LIMITED
    assert refused(control_plane, "Membership/RegisterServer", "rate-limited") == before + 1
    # Two a second: the next one is due after half a second at most.
    assert refusal.retry_after_seconds is not None
    assert 0 < refusal.retry_after_seconds <= 0.5
    assert register(control_plane, pki.issue(Role.SERVER, "calm"), range(1)) is None
    control_plane.pass_time(refusal.retry_after_seconds)
    assert register(control_plane, files, range(20, 21)) is None


def test_ranks_that_are_too_early_try_again() -> None:
    with (
        control_plane_with(
            None, registrations_per_second=5.0, registration_burst=1
        ) as control_plane,
        ExitStack() as stack,
    ):
        for rank in range(3):
            talking = TalkingRank(
                RpcSettings(address=control_plane.address), rank, job_spec(n_ranks=3)
            )
            stack.callback(talking.close, "done")
            talking.open()
        assert refused(control_plane, "Jobs/OpenJob", "rate-limited") >= 2
