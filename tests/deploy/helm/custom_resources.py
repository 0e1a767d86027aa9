"""Checks manifests of custom resources against models of their definitions.

Three groups come as npm packages with generated TypeScript types, which know every field, and
validators, which know values; JobSet and Kubeflow Trainer come as a Python package of models. Of
two more there is no package: what the chart uses of their fields is written down here.
"""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
from jsonschema import Draft7Validator

from tests.deploy.helm.chart import TOOLS, Manifest
from tests.support.programs import ran


def _object(*, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other fields than these."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


_NPM = {
    "cert-manager.io/v1": "@kubernetes-models/cert-manager/cert-manager.io/v1",
    "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}

_PYTHON = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "jobset_v1alpha2_job_set",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "trainer_v1alpha1_train_job",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "trainer_v1alpha1_training_runtime",
}

_SCHEMAS: dict[tuple[str, str], dict[str, Any]] = {
    # github.com/kubernetes-sigs/lws, api/leaderworkerset/v1/leaderworkerset_types.go, at 060ab4d
    # (August 2026).
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): _object(
        required=("leaderWorkerTemplate",),
        replicas={"type": "integer", "minimum": 0, "maximum": 1000000},
        startupPolicy={"enum": ["LeaderCreated", "LeaderReady"]},
        rolloutStrategy=_object(
            required=("type",),
            type={"enum": ["RollingUpdate"]},
            rollingUpdateConfiguration=_object(
                partition={"type": "integer"},
                maxUnavailable={"type": ["integer", "string"]},
                maxSurge={"type": ["integer", "string"]},
            ),
        ),
        leaderWorkerTemplate=_object(
            required=("workerTemplate",),
            size={"type": "integer", "minimum": 1},
            restartPolicy={
                "enum": ["None", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart"]
            },
            workerTemplate={"type": "object"},
        ),
    ),
    # github.com/NVIDIA/k8s-dra-driver-gpu, api/nvidia.com/resource/v1beta1/computedomain.go, at
    # 2240711 (May 2026).
    ("resource.nvidia.com/v1beta1", "ComputeDomain"): _object(
        required=("channel",),
        numNodes={"type": "integer", "minimum": 0},
        channel=_object(
            required=("resourceClaimTemplate",),
            resourceClaimTemplate=_object(
                required=("name",), name={"type": "string", "minLength": 1}
            ),
            allocationMode={"enum": ["All", "Single"]},
        ),
    ),
}
"""Schemas of ``spec``. Pods in them are checked as pods of Kubernetes."""

_CHECK = """
import {{ {kind} }} from "{module}";
import type {{ I{kind} }} from "{module}";
const manifest: I{kind} = {manifest};
try {{ new {kind}(manifest).validate(); }}
catch (error) {{ throw new Error("{label}: " + (error as Error).message); }}
"""

_COMPILE = [
    "node_modules/.bin/tsc",
    "--strict",
    "--skipLibCheck",
    "--module",
    "nodenext",
    "--target",
    "es2022",
    "all.ts",
]


def is_custom(manifest: Manifest) -> bool:
    """Whether ``manifest`` is of a kind that a cluster has only with a definition added."""
    group = manifest["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group == "jobset.x-k8s.io"


def complaints_of_models(manifests: list[Manifest], scratch: Path) -> str:
    """What the npm models find wrong with those ``manifests`` that they know; empty if nothing."""
    known = [manifest for manifest in manifests if manifest["apiVersion"] in _NPM]
    (scratch / "node_modules").symlink_to(TOOLS / "models" / "node_modules")
    (scratch / "package.json").write_text('{"type": "module"}')
    for index, manifest in enumerate(known):
        (scratch / f"check{index}.ts").write_text(
            _CHECK.format(
                kind=manifest["kind"],
                module=_NPM[manifest["apiVersion"]],
                manifest=json.dumps(manifest, indent=1),
                label=f"{manifest['kind']} {manifest['metadata']['name']}",
            )
        )
    files = [f"check{index}.ts" for index in range(len(known))]
    (scratch / "all.ts").write_text("".join(f'import "./{name[:-3]}.js";\n' for name in files))
    return _run(_COMPILE, scratch) or _run(["node", "all.js"], scratch)


def complaints_of_python_models(manifest: Manifest) -> str:
    """The same for JobSet and Kubeflow Trainer; their models drop unknown fields, so what comes
    back is compared with what went in."""
    module = import_module(
        f"kubeflow_trainer_api.models.{_PYTHON[manifest['apiVersion'], manifest['kind']]}"
    )
    (model,) = (
        each
        for name, each in vars(module).items()
        if name.lower() == module.__name__.rpartition(".")[2].replace("_", "")
    )
    try:
        read = model.from_dict(manifest)
    except ValueError as error:
        return str(error)
    return "; ".join(_lost(manifest, read.to_dict(), "$"))


def complaints_of_schemas(manifest: Manifest, kubernetes: str) -> str:
    """The same for what has its schema here, with its pods as of that version of Kubernetes."""
    schema = _SCHEMAS[manifest["apiVersion"], manifest["kind"]]
    found = [error.message for error in Draft7Validator(schema).iter_errors(manifest["spec"])]
    template = manifest["spec"].get("leaderWorkerTemplate", {}).get("workerTemplate")
    if template is not None:
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        try:
            kubernetes_validate.validate(pod, kubernetes, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(str(error))
    return "; ".join(found)


def knows(manifest: Manifest) -> bool:
    """Whether one of the three can check ``manifest``."""
    return manifest["apiVersion"] in _NPM or in_python(manifest) or has_schema(manifest)


def has_schema(manifest: Manifest) -> bool:
    """Whether its schema is here."""
    return (manifest["apiVersion"], manifest["kind"]) in _SCHEMAS


def in_python(manifest: Manifest) -> bool:
    """Whether the Python models know it."""
    return (manifest["apiVersion"], manifest["kind"]) in _PYTHON


def _lost(given: Any, kept: Any, path: str) -> list[str]:
    """Paths of ``given`` that are not in ``kept``."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [
            each
            for key, value in given.items()
            for each in (
                _lost(value, kept[key], f"{path}.{key}")
                if key in kept
                else [f"{path}.{key} is no field"]
            )
        ]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [
            each
            for index, (one, other) in enumerate(zip(given, kept, strict=True))
            for each in _lost(one, other, f"{path}[{index}]")
        ]
    return [] if given == kept else [f"{path} is {given!r}, read as {kept!r}"]


def _run(command: list[str], folder: Path) -> str:
    done = ran(*command, cwd=folder)
    return "" if done.returncode == 0 else done.stdout + done.stderr
