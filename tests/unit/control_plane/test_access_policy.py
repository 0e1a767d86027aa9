"""The table of who may call what covers the protocol, and gives each role what it needs alone."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from control_plane.access.access_policy import POLICIES
from distca.contract.identity import Role
from distca.v1 import (
    cluster_pb2,
    data_plane_pb2,
    jobs_pb2,
    membership_pb2,
    plan_pb2,
    profile_pb2,
)

FILES = (
    cluster_pb2,
    jobs_pb2,
    membership_pb2,
    plan_pb2,
    profile_pb2,
    data_plane_pb2,
    health_pb2,
)

MAY_CALL = {
    Role.TRAINER: {
        "Jobs/DescribePool",
        "Jobs/OpenJob",
        "Jobs/RenewRank",
        "Jobs/CloseJob",
        "Jobs/SubmitManifest",
        "Jobs/WatchRank",
        "Jobs/ReportStep",
        "Jobs/ReportServerLost",
        "Jobs/ReportProgress",
        "Jobs/DescribeJob",
        "Jobs/GetStep",
        "Jobs/LocateRanks",
    },
    Role.SERVER: {
        "Membership/RegisterServer",
        "Membership/Heartbeat",
        "Membership/DrainServer",
        "Membership/DeregisterServer",
        "Membership/ReportRankLost",
        "Membership/ListServers",
        "Jobs/WatchServer",
        "Jobs/ReportStep",
        "Cluster/DescribeCluster",
    },
    Role.OPERATOR: {
        "Membership/DrainServer",
        "Membership/ListServers",
        "Jobs/DescribePool",
        "Jobs/DescribeJob",
        "Jobs/GetStep",
        "Cluster/DescribeCluster",
    },
    Role.READ_ONLY: {
        "Membership/ListServers",
        "Jobs/DescribePool",
        "Jobs/DescribeJob",
        "Jobs/GetStep",
        "Cluster/DescribeCluster",
    },
    Role.CONTROL_PLANE: set(),
}
HEALTH = {"Health/Check", "Health/Watch"}


def methods() -> dict[str, MethodDescriptor]:
    """Every method of the protocol, by full name."""
    return {
        f"/{service.full_name}/{method.name}": method
        for file in FILES
        for service in file.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_the_table_has_every_method_of_the_protocol_and_no_other() -> None:
    assert set(POLICIES) == set(methods())


@pytest.mark.parametrize("role", Role)
def test_a_role_may_call_these_methods(role: Role) -> None:
    allowed = {name.rpartition(".")[2] for name, p in POLICIES.items() if role in p.roles}
    assert allowed == MAY_CALL[role] | HEALTH


def test_whoever_names_a_job_as_a_trainer_must_show_its_token() -> None:
    for name, policy in POLICIES.items():
        names_a_job = "job_id" in methods()[name].input_type.fields_by_name
        expected = {Role.TRAINER} & policy.roles if names_a_job else set()
        assert policy.token_roles == expected, name
        assert policy.token_roles <= policy.roles, name


def test_what_makes_a_member_is_limited_in_rate() -> None:
    limited = {name for name, policy in POLICIES.items() if policy.registers}
    assert limited == {
        "/distca.v1.Membership/RegisterServer",
        "/distca.v1.Jobs/OpenJob",
    }
