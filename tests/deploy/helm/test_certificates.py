"""Certificates: by cert-manager or from Secrets, one for each role."""

from __future__ import annotations

import pytest

from distca.contract.identity import Role, identity_of
from tests.deploy.helm.chart import (
    Manifest,
    container,
    environment,
    kinds,
    only,
    pod_specs,
    rendered,
)

ROLES = {
    "control-plane": Role.CONTROL_PLANE,
    "attention-node": Role.SERVER,
    "trainer": Role.TRAINER,
    "operator": Role.OPERATOR,
}


def tls_secrets(manifests: list[Manifest]) -> dict[str, str]:
    """Name of the Secret at the place of certificates, by owner of the pod."""
    return {
        owner: volume["secret"]["secretName"]
        for owner, spec in pod_specs(manifests)
        for volume in spec["volumes"]
        if volume["name"] == "tls"
    }


@pytest.mark.parametrize("part", ROLES)
def test_each_role_has_a_certificate_that_the_control_plane_recognises(part: str) -> None:
    manifests = rendered("mtls-own-authority-values.yaml")
    spec = only(manifests, "Certificate", f"distca-{part}")["spec"]
    identity = identity_of(spec["uris"])
    assert identity is not None
    assert (identity.role, identity.name) == (ROLES[part], "rel-distca")
    assert "client auth" in spec["usages"]
    serves = part in ("control-plane", "attention-node")
    assert ("server auth" in spec["usages"]) == serves
    assert ("localhost" in spec.get("dnsNames", [])) == serves
    assert spec["privateKey"]["rotationPolicy"] == "Always"


def test_pods_mount_the_secret_that_cert_manager_writes_for_their_role() -> None:
    manifests = rendered("mtls-own-authority-values.yaml", "exampleJob.enabled=true")
    written = {each["spec"]["secretName"] for each in manifests if each["kind"] == "Certificate"}
    mounted = tls_secrets(manifests)
    assert mounted == {
        "Deployment rel-distca-control-plane": "rel-distca-control-plane-tls",
        "StatefulSet rel-distca-attention-node": "rel-distca-attention-node-tls",
        f"JobSet {only(manifests, 'JobSet')['metadata']['name']}": "rel-distca-trainer-tls",
        "Pod rel-distca-test": "rel-distca-operator-tls",
    }
    assert set(mounted.values()) <= written


def test_the_own_authority_signs_everything_but_itself() -> None:
    manifests = rendered("mtls-own-authority-values.yaml")
    certificates = [each for each in manifests if each["kind"] == "Certificate"]
    issuers = {each["metadata"]["name"] for each in manifests if each["kind"] == "Issuer"}
    signed_by = {
        each["metadata"]["name"]: each["spec"]["issuerRef"]["name"] for each in certificates
    }
    assert signed_by.pop("rel-distca-ca") == "rel-distca-self-signed"
    assert set(signed_by.values()) == {"rel-distca-ca"}
    assert issuers == {"rel-distca-self-signed", "rel-distca-ca"}


def test_an_issuer_of_the_cluster_is_used_when_named() -> None:
    manifests = rendered("mtls-cert-manager-values.yaml")
    assert "Issuer" not in kinds(manifests)
    for each in manifests:
        if each["kind"] == "Certificate":
            assert each["spec"]["issuerRef"]["name"] == "company-ca"
            assert each["spec"]["issuerRef"]["kind"] == "ClusterIssuer"
    names = only(manifests, "Certificate", "distca-control-plane")["spec"]["dnsNames"]
    assert "distca.example.com" in names
    assert "rel-distca-control-plane.research.svc" in names


def test_secrets_made_by_hand_are_mounted_and_nothing_is_issued() -> None:
    manifests = rendered("mtls-secrets-values.yaml")
    assert not kinds(manifests) & {"Certificate", "Issuer"}
    assert set(tls_secrets(manifests).values()) == {
        "distca-control-plane",
        "distca-server",
        "distca-trainer",
        "distca-operator",
    }


def test_the_control_plane_asks_clients_for_certificates() -> None:
    manifests = rendered("mtls-own-authority-values.yaml")
    (spec,) = (spec for owner, spec in pod_specs(manifests) if owner.startswith("Deployment"))
    run = container(spec, "control-plane")
    assert environment(run)["DISTCA_TLS_CLIENT_CA"] == "/etc/distca/tls/ca.crt"
    mounts = {mount["mountPath"]: mount for mount in run["volumeMounts"]}
    assert mounts["/etc/distca/tls"]["readOnly"] is True


def test_plaintext_mounts_and_asks_for_nothing() -> None:
    manifests = rendered()
    assert tls_secrets(manifests) == {}
    assert "DISTCA_TLS" not in str(manifests)
