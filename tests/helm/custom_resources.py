"""Checks manifests of custom resources against models of their definitions.

Three groups come as npm packages with generated TypeScript types, which know every field, and
validators, which know values; JobSet and Kubeflow Trainer come as a Python package of models.
"""

from __future__ import annotations

import json
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.helm.chart import TOOLS, Manifest

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


def knows(manifest: Manifest) -> bool:
    """Whether one of the two can check ``manifest``."""
    version = manifest["apiVersion"]
    return version in _NPM or (version, manifest["kind"]) in _PYTHON


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
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    return "" if done.returncode == 0 else done.stdout + done.stderr
