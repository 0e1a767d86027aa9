"""Checks manifests of custom resources against models of their definitions.

Three groups come as npm packages with generated TypeScript types, which know every field, and
validators, which know values.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.deploy.helm.chart import TOOLS, Manifest
from tests.support.programs import ran

_NPM = {
    "cert-manager.io/v1": "@kubernetes-models/cert-manager/cert-manager.io/v1",
    "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
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


def knows(manifest: Manifest) -> bool:
    """Whether the npm models can check ``manifest``."""
    return manifest["apiVersion"] in _NPM


def _run(command: list[str], folder: Path) -> str:
    done = ran(*command, cwd=folder)
    return "" if done.returncode == 0 else done.stdout + done.stderr
