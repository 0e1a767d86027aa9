"""Certificates: by cert-manager or from Secrets, one for each role."""

from __future__ import annotations

import pytest

from distca.contract.identity import Role, identity_of
from tests.deploy.helm.chart import only, rendered

ROLES = {
    "control-plane": Role.CONTROL_PLANE,
    "attention-node": Role.SERVER,
    "trainer": Role.TRAINER,
    "operator": Role.OPERATOR,
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
