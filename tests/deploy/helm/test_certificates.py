"""Certificates: by cert-manager or from Secrets, one for each role."""

from __future__ import annotations

import pytest

from distca.contract.identity import Role, identity_of
from tests.deploy.helm.chart import (
    Manifest,
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
    serves = part == "control-plane"
    assert ("server auth" in spec["usages"]) == serves
    assert ("localhost" in spec.get("dnsNames", [])) == serves
    assert spec["privateKey"]["rotationPolicy"] == "Always"


def test_pods_mount_the_secret_that_cert_manager_writes_for_their_role() -> None:
    manifests = rendered("mtls-own-authority-values.yaml")
    written = {each["spec"]["secretName"] for each in manifests if each["kind"] == "Certificate"}
    mounted = tls_secrets(manifests)
    assert mounted == {
        "Deployment rel-distca-control-plane": "rel-distca-control-plane-tls",
        "StatefulSet rel-distca-attention-node": "rel-distca-attention-node-tls",
        "Pod rel-distca-test": "rel-distca-operator-tls",
    }
    assert set(mounted.values()) <= written
