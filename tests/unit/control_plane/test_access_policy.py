"""The table of who may call what, which docs/security.md has too, covers the protocol."""

from __future__ import annotations

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
