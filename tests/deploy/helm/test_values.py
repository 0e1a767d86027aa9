"""values.yaml: every value has a comment, stands in the README, and changes what is rendered, which
is valid for the oldest version of Kubernetes and the newest."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests import ROOT
from tests.deploy.helm.chart import CHART, NAMESPACE, RELEASE, VALUE_SETS, Manifest, helm
from tests.deploy.helm.custom_resources import (
    complaints_of_models,
    complaints_of_python_models,
    complaints_of_schemas,
    has_schema,
    in_python,
    is_custom,
)
from tests.deploy.helm.test_manifests import KUBERNETES
from tests.support.programs import ran
from tools.chart_readme import (
    Value,
    read_values,
)

VALUES = read_values((CHART / "values.yaml").read_text())

EVERYTHING = {
    "controlPlane": {"leaderElection": {"enabled": True}, "replicas": 4},
    "rdma": {"enabled": True},
    "tls": {"mode": "certManager", "certManager": {"issuerRef": {"name": "ca"}}},
    "monitoring": {
        name: {"enabled": True}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    },
    "exampleJob": {"enabled": True, "runVolume": {"hostPath": {"path": "/runs"}}},
}
"""Turns on whatever reads values."""

ALSO_NEEDED: dict[str, dict[str, Any]] = {
    "controlPlane.address": {"controlPlane": {"enabled": False, "address": "a:1"}},
    "attentionNode.hostNetwork": {
        "attentionNode": {"affinity": {"nodeAffinity": {}}},
        "networkPolicy": {"hostNetworkFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    },
    "networkPolicy.hostNetworkFrom": {
        "attentionNode": {"affinity": {"nodeAffinity": {}}, "hostNetwork": True},
        "networkPolicy": {"hostNetworkFrom": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]},
    },
    "attentionNode.leaderWorkerSet.size": {
        "attentionNode": {
            "kind": "LeaderWorkerSet",
            "replicas": 4,
            "podDisruptionBudget": {"maxUnavailable": 2},
        }
    },
    "attentionNode.leaderWorkerSet.exclusiveTopology": {
        "attentionNode": {"kind": "LeaderWorkerSet"}
    },
    "gpu.dra.deviceClassName": {"gpu": {"dra": {"enabled": True}}},
    "gpu.dra.selectors": {"gpu": {"dra": {"enabled": True}}},
    "dataInterface.networkAttachment": {"dataInterface": {"name": "net1"}},
    "attentionNode.replicas": {"autoscaling": {"enabled": False}},
    "attentionNode.rollout.maxUnavailable": {
        "attentionNode": {"replicas": 4, "podDisruptionBudget": {"maxUnavailable": 2}}
    },
    "autoscaling.kind": {"autoscaling": {"enabled": True}},
    "autoscaling.keda.prometheusAddress": {"autoscaling": {"enabled": True, "kind": "KEDA"}},
    "autoscaling.keda.pollingSeconds": {"autoscaling": {"enabled": True, "kind": "KEDA"}},
    **{
        f"autoscaling.{name}": {"autoscaling": {"enabled": True}}
        for name in ("minReplicas", "maxReplicas", "metric", "target", "scaleDownSeconds")
    },
    **{
        f"tls.secrets.{role}": {
            "tls": {
                "mode": "secrets",
                "secrets": dict.fromkeys(
                    ("controlPlane", "attentionNode", "trainer", "operator"), "s"
                ),
            }
        }
        for role in ("controlPlane", "attentionNode", "trainer", "operator")
    },
}
"""More that has to be set before a value has an effect."""

OTHER: dict[str, Any] = {
    "logLevel": "debug",
    "image.pullPolicy": "Always",
    "image.pullSecrets": [{"name": "s"}],
    "controlPlane.address": "elsewhere:7700",
    "controlPlane.image.digest": f"sha256:{'1' * 64}",
    "attentionNode.image.digest": f"sha256:{'1' * 64}",
    "exampleJob.image.digest": f"sha256:{'1' * 64}",
    "controlPlane.replicas": 5,
    # Those next to them are taken.
    "controlPlane.service.port": 7750,
    "attentionNode.ports.data": 7610,
    "attentionNode.ports.health": 7611,
    "attentionNode.rollout.maxUnavailable": 2,
    "controlPlane.service.type": "NodePort",
    "attentionNode.kind": "DaemonSet",
    "attentionNode.leaderWorkerSet.exclusiveTopology": "nvidia.com/gpu.clique",
    "gpu.dra.deviceClassName": "mig.nvidia.com",
    "gpu.dra.selectors": [{"cel": {"expression": "true"}}],
    "dataInterface.networkAttachment": "fabric/rows",
    "attentionNode.shapes": ["1:1:8:float32"],
    "attentionNode.sharedMemorySize": "1Gi",
    "attentionNode.doctor.skip": ["clock"],
    "controlPlane.planner": "balanced",
    "transport": "nixl",
    "rdma.transports": "dc,tcp,self",
    "rdma.addressType": "ib",
    "ucx.tcpPortRange": "9000-9099",
    "ucx.env": {"UCX_LOG_LEVEL": "info"},
    "autoscaling.kind": "KEDA",
    "autoscaling.keda.prometheusAddress": "https://p",
    "tls.mode": "none",
    "tls.certManager.issuerRef.kind": "ClusterIssuer",
    "tls.certManager.duration": "100h",
    "tls.certManager.renewBefore": "10h",
    "networkPolicy.jobNamespaceSelector": {"matchLabels": {"a": "b"}},
    "networkPolicy.jobNamespaces": ["team-a"],
    "monitoring.prometheusRule.runbookUrl": "https://r",
    "exampleJob.kind": "TrainJob",
    "exampleJob.placement": "mixed",
}
"""What a value is changed to, where its type alone does not tell."""

BY_NAME: dict[str, Any] = {
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    ],
    "tolerations": [{"key": "x", "operator": "Exists"}],
    "updateStrategy": {"type": "OnDelete"},
    "resources": {"requests": {"cpu": "9"}},
    "cacheVolume": {"hostPath": {"path": "/x"}},
    "runVolume": {"hostPath": {"path": "/x"}},
    "extraEnvFrom": [{"configMapRef": {"name": "x"}}],
    "extraVolumeMounts": [{"name": "x", "mountPath": "/x"}],
    "podSecurityContext": {"runAsUser": 10002},
    "securityContext": {"runAsUser": 10002},
    "relabelings": [{"action": "labeldrop", "regex": "x"}],
    "metricRelabelings": [{"action": "labeldrop", "regex": "x"}],
    "jobsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "hostNetworkFrom": [{"ipBlock": {"cidr": "10.1.0.0/16"}}],
    "metricsFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
    "controlPlaneFrom": [{"podSelector": {"matchLabels": {"a": "b"}}}],
}
"""The same by the last part of the path."""

NEEDS_NEWEST = ("gpu.dra", "gpu.computeDomain")
"""Values whose manifests the oldest version of Kubernetes does not know."""

ALLOWED_WITH: dict[str, dict[str, Any]] = {
    "controlPlane.enabled": {"controlPlane": {"address": "a:1"}},
    "controlPlane.leaderElection.enabled": {"controlPlane": {"replicas": 1}},
    "attentionNode.enabled": {"exampleJob": {"placement": "in-place"}},
}
"""What must change along with a value for the change to be allowed."""


def changed(value: Value) -> Any:
    """Something else of the value's type."""
    if value.path in OTHER:
        return OTHER[value.path]
    name = value.path.rpartition(".")[2]
    if name in BY_NAME:
        return BY_NAME[name]
    default = json.loads(value.default)
    if value.path.endswith(("interval", "scrapeTimeout")):
        return "9s"
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return default + 1
    if isinstance(default, str):
        return f"{default}x"
    if isinstance(default, list):
        arguments = value.path.endswith(("Args", "args", "Names"))
        return [*default, "x"] if arguments else [*default, {"name": "x"}]
    return {**default, "x": "y"}


def overrides(path: str, setting: Any) -> dict[str, Any]:
    """{"a": {"b": setting}} of "a.b"."""
    for name in reversed(path.split(".")):
        setting = {name: setting}
    return dict(setting)


def render(values: dict[str, Any]) -> str:
    """The manifests, without the random Secret."""
    return _render(*(f"--set-json={key}={json.dumps(value)}" for key, value in values.items()))


@cache
def _render(*arguments: str) -> str:
    done = helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *arguments)
    assert done.returncode == 0, done.stderr
    documents = done.stdout.split("\n---\n")
    return "\n---\n".join(text for text in documents if "\nkind: Secret\n" not in text)


def merged(*overlays: dict[str, Any]) -> dict[str, Any]:
    """Deep union; later ones win."""
    result: dict[str, Any] = {}
    for overlay in overlays:
        for key, value in overlay.items():
            both = isinstance(value, dict) and isinstance(result.get(key), dict)
            result[key] = merged(result[key], value) if both else value
    return result


def before_and_after(value: Value) -> tuple[str, str]:
    """What is rendered with the value as it comes, and with another one."""
    base = merged(EVERYTHING, ALSO_NEEDED.get(value.path, {}))
    default = json.loads(value.default)
    here: Any = base
    for name in value.path.split("."):
        here = here.get(name, default) if isinstance(here, dict) else default
    other = changed(value)
    if isinstance(default, bool):
        other = not here
    after = merged(base, overrides(value.path, other), ALLOWED_WITH.get(value.path, {}))
    return render(base), render(after)


def changed_manifests(value: Value) -> list[Manifest]:
    """Those that another value makes, or makes otherwise."""
    before, after = before_and_after(value)
    known = set(before.split("\n---\n"))
    texts = [text for text in after.split("\n---\n") if text not in known]
    return [each for text in texts if (each := yaml.load(text, yaml.CSafeLoader))]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value.path)
def test_every_value_changes_what_is_rendered_and_it_is_valid(value: Value) -> None:
    before, after = before_and_after(value)
    assert before != after
    newest_alone = value.path.startswith(NEEDS_NEWEST)
    for manifest in changed_manifests(value):
        if in_python(manifest):
            assert complaints_of_python_models(manifest) == ""
        elif has_schema(manifest):
            assert complaints_of_schemas(manifest, KUBERNETES[-1]) == ""
        elif not is_custom(manifest):
            for version in KUBERNETES[-1:] if newest_alone else (KUBERNETES[0], KUBERNETES[-1]):
                kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.timeout(300)
def test_what_values_change_in_custom_resources_is_valid(tmp_path: Path) -> None:
    distinct = {
        json.dumps(manifest, sort_keys=True): manifest
        for value in VALUES
        for manifest in changed_manifests(value)
        if is_custom(manifest)
    }
    assert {"Certificate", "ScaledObject"} < {each["kind"] for each in distinct.values()}
    assert complaints_of_models(list(distinct.values()), tmp_path) == ""


def test_every_value_is_used_by_a_value_set() -> None:
    """Each of which is rendered, linted and validated; what is on or off is on in one, and off in
    one."""
    sets = [yaml.safe_load((CHART / "ci" / name).read_text()) for name in VALUE_SETS]
    unused = []
    for value in VALUES:
        used = [found for each in sets if (found := lookup(each, value.path)) is not None]
        if not used:
            unused.append(value.path)
        elif value.default in ("true", "false"):
            assert {json.loads(value.default), *used} == {True, False}, value.path
    assert unused == []


def lookup(values: dict[str, Any], path: str) -> Any:
    """The value at ``path``; None if it is not set."""
    here: Any = values
    for name in path.split("."):
        here = here.get(name) if isinstance(here, dict) else None
    return here


def test_the_readme_is_what_values_yaml_says() -> None:
    done = ran(sys.executable, str(ROOT / "tools" / "chart_readme.py"), "--check")
    assert done.returncode == 0, done.stderr


def test_large_numbers_are_written_in_digits() -> None:
    """A number in a file is a float to helm, which writes a million as 1e+06: no integer."""
    million = 1_000_000
    counted = merged(
        {
            "controlPlane": {
                "replicas": million,
                "leaderElection": {"enabled": True},
                "planningThreads": million,
                "terminationGracePeriodSeconds": million,
                "podDisruptionBudget": {"minAvailable": 999_999},
            },
            "attentionNode": {
                "replicas": 2 * million,
                "rollout": {"maxUnavailable": million},
                "podDisruptionBudget": {"maxUnavailable": million},
            },
            "exampleJob": {
                "enabled": True,
                "nodes": million,
                "restarts": million,
                "runVolume": {"hostPath": {"path": "/runs"}},
            },
        }
    )
    scaling = {"minReplicas": million, "maxReplicas": 2 * million, "target": million}
    for extra in (
        {},
        {"exampleJob": {"kind": "TrainJob"}},
        {"attentionNode": {"kind": "Deployment"}},
        {"attentionNode": {"kind": "LeaderWorkerSet", "leaderWorkerSet": {"size": 1}}},
        {"autoscaling": {**scaling, "enabled": True}},
        {
            "autoscaling": {
                **scaling,
                "enabled": True,
                "kind": "KEDA",
                "keda": {"pollingSeconds": million},
            }
        },
    ):
        text = render(merged(counted, extra))
        assert "1000000" in text
        assert "e+0" not in text
