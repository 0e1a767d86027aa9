"""Who has no good certificate gets no connection, or no answer, and is counted."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.server import ControlPlane
from distca.contract import rpc
from distca.contract.identity import Role
from distca.v1 import cluster_pb2
from tests.service.security.pki import (
    HOUR,
    Files,
    Pki,
    control_plane_with,
    refused,
    refused_soon,
    secure_client,
)
from tests.support.errors import fails
from tests.support.service_harness import Client, client_of


@pytest.fixture(scope="module")
def control_plane(pki: Pki) -> Iterator[ControlPlane]:
    with control_plane_with(pki.issue(Role.CONTROL_PLANE).for_server()) as control_plane:
        yield control_plane


def describe(client: Client) -> Any:
    return client.cluster.DescribeCluster(cluster_pb2.DescribeClusterRequest())


def handshakes_refused(control_plane: ControlPlane) -> float:
    return refused(control_plane, "connection", "no-handshake")


def test_a_good_certificate_is_let_in_and_counts_as_no_refusal(
    control_plane: ControlPlane, pki: Pki
) -> None:
    before = handshakes_refused(control_plane)
    with secure_client(control_plane, pki.issue(Role.OPERATOR)) as client:
        describe(client)
        time.sleep(1.5)  # three times as long as a connection without a call may last
        describe(client)
    assert handshakes_refused(control_plane) == before


@pytest.mark.parametrize("kind", ["none", "foreign", "expired", "not yet good", "plaintext"])
def test_a_connection_without_a_good_certificate_is_refused_and_counted(
    control_plane: ControlPlane, pki: Pki, foreign_pki: Pki, kind: str
) -> None:
    foreign = foreign_pki.issue(Role.OPERATOR)
    settings: dict[str, dict[str, Any]] = {
        "none": {"ca_file": pki.ca_file},
        "foreign": {**foreign.for_client(), "ca_file": pki.ca_file},
        "expired": pki.issue(Role.OPERATOR, "late", lifetime=-timedelta(minutes=1)).for_client(),
        "not yet good": pki.issue(Role.OPERATOR, "early", starts_in=HOUR / 2).for_client(),
        "plaintext": {},
    }
    before = int(handshakes_refused(control_plane))
    with (
        client_of(control_plane.address, call_seconds=60.0, **settings[kind]) as client,
        fails(rpc.Reason.UNAVAILABLE),
    ):
        describe(client)
    refused_soon(control_plane, "connection", "no-handshake", before + 1)


@pytest.mark.parametrize("uris", [[], ["spiffe://distca/king/a"], ["spiffe://other/operator/a"]])
def test_a_certificate_without_a_role_is_unauthenticated(
    control_plane: ControlPlane, pki: Pki, uris: list[str]
) -> None:
    files = pki.issue(Role.OPERATOR, "nameless")
    _sign_with_uris(pki, files, uris)
    before = refused(control_plane, "Cluster/DescribeCluster", "no-identity")
    with (
        secure_client(control_plane, files) as client,
        fails(rpc.Reason.NO_IDENTITY),
    ):
        describe(client)
    assert refused(control_plane, "Cluster/DescribeCluster", "no-identity") == before + 1


def test_a_certificate_that_ends_during_a_connection_is_refused_from_then_on(
    control_plane: ControlPlane, pki: Pki
) -> None:
    files = pki.issue(Role.OPERATOR, "brief", lifetime=timedelta(seconds=3))
    with secure_client(control_plane, files) as client:
        describe(client)
        time.sleep(3.0)
        with fails(rpc.Reason.EXPIRED_CERTIFICATE):
            describe(client)
    assert refused(control_plane, "Cluster/DescribeCluster", "expired-certificate") == 1


def test_health_answers_every_role_and_nobody_else(
    control_plane: ControlPlane, pki: Pki, foreign_pki: Pki
) -> None:
    for role in Role:
        with secure_client(control_plane, pki.issue(role)) as client:
            answer = health_pb2_grpc.HealthStub(client.channel).Check(
                health_pb2.HealthCheckRequest()
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(control_plane.address) as channel:
        with pytest.raises(grpc.RpcError) as caught:
            health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def _sign_with_uris(pki: Pki, files: Files, uris: list[str]) -> None:
    """Signs the certificate of ``files`` again, with other URIs."""
    old = x509.load_pem_x509_certificate(files.certificate_file.read_bytes())
    authority = pki.authority.pem
    key = load_pem_private_key(authority.key, password=None)
    names: list[x509.GeneralName] = [x509.DNSName("a"), *map(x509.UniformResourceIdentifier, uris)]
    signed = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(old.issuer)
        .public_key(old.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(key, hashes.SHA256())  # type: ignore[arg-type]
    )
    files.certificate_file.write_bytes(signed.public_bytes(Encoding.PEM))
