"""What a release needs beside a build: `make release-check`, `make push-chart`, `make references`.

    python -m tools.release check v1.2.3
    python -m tools.release push-chart registry.example.com/ml --helm helm
    python -m tools.release references

Whatever is pushed leaves a file in ``build/release`` that says where it lies and what its digest
is, in the form of buildx' metadata files; signatures are made for digests, never for tags.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDER: Final = ROOT / "build" / "release"

CHARTS: Final = "charts"
"""Folder of charts below the registry's; images lie beside it."""

_DIGEST: Final = "containerimage.digest"
_NAME: Final = "image.name"
_PUSH_SECONDS: Final = 300.0
_REGISTRY_LINE: Final = '  registry: ""\n'


class ReleaseError(Exception):
    """A release must not be made, or a part of it failed; says why and what to do."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line; exits with 1 and the reason when something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="refuse a tag that is not this version's")
    check.add_argument("tag", help="vX.Y.Z")
    push = commands.add_parser("push-chart", help="push the chart as an OCI artifact")
    push.add_argument("registry", help="where images are pushed, too")
    push.add_argument("--helm", default="helm")
    push.add_argument("--option", action="append", default=[], help="of helm push")
    commands.add_parser("references", help="print NAME@DIGEST of all that was pushed")
    for command in (push, commands.choices["references"]):
        command.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args(arguments)
    try:
        if given.command == "check":
            check_versions(ROOT, given.tag)
        elif given.command == "push-chart":
            push_chart(given.registry, helm=given.helm, options=given.option, folder=given.folder)
        else:
            print("\n".join(references(given.folder)))
    except ReleaseError as error:
        sys.exit(str(error))


def check_versions(root: Path, tag: str) -> None:
    """Compares the tag of a release with every place where the version stands, and looks for the
    release in the changelog.

    Args:
        root: of the repository.
        tag: as git has it, ``vX.Y.Z``.

    Raises:
        ReleaseError: names every place that differs.
    """
    if not re.fullmatch(r"v\d+\.\d+\.\d+", tag):
        raise ReleaseError(
            f"the tag is {tag!r}; give vX.Y.Z, for example make release-check TAG=v0.1.0"
        )
    version = tag.removeprefix("v")
    differing = [
        f"{place} says {found}" for place, found in versions(root).items() if found != version
    ]
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", _changelog(root), re.M):
        differing.append(f"CHANGELOG.md has no heading '## [{version}] - YEAR-MONTH-DAY'")
    if differing:
        raise ReleaseError(f"{tag} cannot be released: " + "; ".join(differing))


def versions(root: Path) -> dict[str, str]:
    """Every place where the version stands, and what it says."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((root / "helm/distca/Chart.yaml").read_text())
    tag = re.search(r"^DISTCA_TAG=(.*)$", (root / "docker/.env").read_text(), re.M)
    return {
        "pyproject.toml": str(project["version"]),
        "version of helm/distca/Chart.yaml": str(chart["version"]),
        "appVersion of helm/distca/Chart.yaml": str(chart["appVersion"]),
        "DISTCA_TAG of docker/.env": tag[1] if tag else "nothing",
    }


def push_chart(registry: str, *, helm: str, options: Sequence[str], folder: Path) -> str:
    """Packs the chart, with ``registry`` as the default of its ``image.registry``, and pushes it.

    Args:
        registry: host and folder, as for ``make push``.
        helm: the program.
        options: of ``helm push``, for example ``--plain-http``.
        folder: where the packed chart and what is known of it are put.

    Returns:
        NAME@DIGEST.

    Raises:
        ReleaseError: helm refuses, or says no digest.
    """
    registry = registry.rstrip("/")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        chart = Path(scratch) / "distca"
        shutil.copytree(ROOT / "helm" / "distca", chart)
        values = chart / "values.yaml"
        text = values.read_text()
        if text.count(_REGISTRY_LINE) != 1:
            raise ReleaseError("values.yaml of the chart has no line for an empty image.registry")
        values.write_text(text.replace(_REGISTRY_LINE, f"  registry: {registry}\n"))
        said = _run(helm, "package", str(chart), f"--destination={folder}")
    packed = Path(said.strip().rpartition("Successfully packaged chart and saved it to: ")[2])
    said = _run(helm, "push", str(packed), f"oci://{registry}/{CHARTS}", *options)
    pushed = re.search(r"^Pushed: (\S+)$", said, re.M)
    digest = re.search(r"^Digest: (sha256:[0-9a-f]{64})$", said, re.M)
    if pushed is None or digest is None:
        raise ReleaseError(f"helm push names no digest; it says: {said}")
    metadata = {_NAME: pushed[1], _DIGEST: digest[1]}
    (folder / "chart.json").write_text(json.dumps(metadata))
    return _reference(metadata)


def references(folder: Path) -> list[str]:
    """NAME@DIGEST of everything that was pushed, in the order of its files' names.

    Raises:
        ReleaseError: nothing was, or a file says no digest.
    """
    found = []
    for path in sorted(folder.glob("*.json")):
        metadata = json.loads(path.read_text())
        if not metadata.keys() >= {_NAME, _DIGEST}:
            raise ReleaseError(f"{path} names no digest; was the image pushed?")
        found.append(_reference(metadata))
    if not found:
        raise ReleaseError(f"nothing was pushed: {folder} has no files; make publish push-chart")
    return found


def _reference(metadata: dict[str, Any]) -> str:
    """buildx names every tag, after commas; all have one digest."""
    name = str(metadata[_NAME]).partition(",")[0]
    # The colon of a port has a path behind it, the one of a tag has not.
    return f"{re.sub(r':[^/:]+$', '', name)}@{metadata[_DIGEST]}"


def _changelog(root: Path) -> str:
    return (root / "CHANGELOG.md").read_text()


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PUSH_SECONDS)
    except FileNotFoundError:
        raise ReleaseError(
            f"{command[0]} is not installed; give another with HELM=..., for example that of "
            "make chart-tools: HELM=build/chart-tools/new/helm"
        ) from None
    if done.returncode:
        raise ReleaseError(f"{' '.join(command[:2])} failed: {done.stderr.strip()}")
    # What was pushed is written to stderr by some versions, to stdout by others.
    return done.stdout + done.stderr


if __name__ == "__main__":
    main()
