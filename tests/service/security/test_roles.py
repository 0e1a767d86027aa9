"""Every method is called with every role's certificate: those of the table get an answer of the
method's own, all others PERMISSION_DENIED, counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message_factory import GetMessageClass

from control_plane.access.access import short_name
from control_plane.access.access_policy import POLICIES
from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import cluster_pb2, jobs_pb2, membership_pb2
from tests.service.security.pki import Pki, control_plane_with, refused, secure_client
from tests.support.errors import fails
from tests.support.service_harness import Client, client_of, job_spec, running
from tests.unit.control_plane.test_access_policy import methods

NEED_NOTHING = {"Cluster/DescribeCluster", "Jobs/DescribePool"}
"""What answers an empty request."""

METHODS = {name: method for name, method in methods().items() if "grpc.health" not in name}


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[ControlPlane]:
    with control_plane_with(pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane:
        yield control_plane


@pytest.fixture(scope="module")
def clients(control_plane: ControlPlane, pki: Pki) -> Iterator[dict[Role, Client]]:
    """A client of each role."""
    managers = {role: secure_client(control_plane, pki.issue(role)) for role in Role}
    opened = {role: manager.__enter__() for role, manager in managers.items()}
    yield opened
    for manager in managers.values():
        manager.__exit__(None, None, None)


def call_empty(client: Client, name: str, method: MethodDescriptor) -> None:
    """Calls a method with an empty request, which most methods can do nothing with.

    Raises:
        RpcError: what it answers.
    """
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    kind = client.channel.unary_stream if method.server_streaming else client.channel.unary_unary
    call = kind(name, request.SerializeToString, response.FromString)
    answer: Any = call(request())
    if method.server_streaming:
        next(answer)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", METHODS)
def test_a_method_answers_the_roles_of_the_table_alone(
    control_plane: ControlPlane, clients: dict[Role, Client], name: str, role: Role
) -> None:
    short = short_name(name)
    before = refused(control_plane, short, "wrong-role")
    error = None
    try:
        call_empty(clients[role], name, METHODS[name])
    except rpc.RpcError as raised:
        error = raised
    if role not in POLICIES[name].roles:
        assert error is not None
        assert error.reason is rpc.Reason.WRONG_ROLE
        assert refused(control_plane, short, "wrong-role") == before + 1
    elif short not in NEED_NOTHING:
        # The method's own: the request is empty.
        assert error is not None
        own = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
        assert error.reason.status in own


def test_a_server_drains_itself_alone_and_an_operator_anyone(
    control_plane: ControlPlane, clients: dict[Role, Client]
) -> None:
    server, operator = clients[Role.SERVER], clients[Role.OPERATOR]
    own, other = server.register("own"), server.register("other")
    for lease in (other, "", "guessed"):
        with fails(rpc.Reason.WRONG_TOKEN, rpc.Reason.LEASE_EXPIRED):
            server.membership.DrainServer(
                membership_pb2.DrainServerRequest(server_id="own", lease_id=lease)
            )
    assert not server.heartbeat(own).draining
    server.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="own", lease_id=own))
    assert server.heartbeat(own).draining
    operator.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="other"))
    assert server.heartbeat(other).draining


def test_addresses_are_for_operators_alone(
    control_plane: ControlPlane, clients: dict[Role, Client]
) -> None:
    lease = clients[Role.SERVER].register("addressed")
    seen = {}
    for role in (Role.OPERATOR, Role.READ_ONLY, Role.SERVER):
        listed = clients[role].cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest()).servers
        seen[role] = {s.server.data_address for s in listed if s.server.server_id == "addressed"}
    assert seen == {Role.OPERATOR: {"127.0.0.1:9000"}, Role.READ_ONLY: {""}, Role.SERVER: {""}}
    clients[Role.SERVER].membership.DeregisterServer(
        membership_pb2.DeregisterServerRequest(lease_id=lease)
    )


def test_without_certificates_all_is_open_and_one_warning_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        running(listen_address="0.0.0.0:0") as control_plane,
        client_of(control_plane.address) as client,
    ):
        client.register("s0")
        job_id, _ = client.open(0, job_spec(n_ranks=1))
        client.jobs.DescribeJob(jobs_pb2.DescribeJobRequest(job_id=job_id))
        (listed,) = client.cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest()).servers
        assert listed.server.data_address
        client.membership.DrainServer(membership_pb2.DrainServerRequest(server_id="s0"))
    warnings = [r.getMessage() for r in caplog.records if r.name == "control_plane.server"]
    assert len(warnings) == 1
    assert "asks for no client certificates" in warnings[0]


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
def test_on_this_machine_alone_that_is_no_warning(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    with running(listen_address=f"{host}:0"):
        pass
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
