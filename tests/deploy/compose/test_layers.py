"""What a host pulls when DistCA changes: its own layer, and none of its packages'."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.compose.test_push import PUSH_SECONDS, registry
from tests.deploy.conftest import BUILD_SECONDS, build
from tests.deploy.docker_engine import Docker
from tests.unit.deploy.test_compose_files import IMAGES

__all__ = ["registry"]

pytestmark = pytest.mark.timeout(4 * BUILD_SECONDS)

MAX_PULLED_BYTES = 5_000_000
MANIFEST_TYPES = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)

Layers = dict[str, int]
"""Bytes of an image's layers as they are pulled, by digest, from below."""


def pushed(docker: Docker, registry: str, image: str, name: str) -> Layers:
    """Pushes a local image under ``name``; its layers in the registry."""
    there = f"{registry}/{name}:layers"
    docker("tag", image, there)
    docker("push", there, timeout_seconds=PUSH_SECONDS)
    docker("rmi", there)
    request = urllib.request.Request(
        f"http://{registry}/v2/{name}/manifests/layers",
        headers={"Accept": ",".join(MANIFEST_TYPES)},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        manifest = json.load(answer)
    return {layer["digest"]: layer["size"] for layer in manifest["layers"]}


@pytest.fixture
def patched(checkout: Path, tmp_path: Path) -> Path:
    """The checkout as a patch release has it: one line more, and the next version."""
    folder = tmp_path / "patched"
    shutil.copytree(checkout, folder, symlinks=True)
    with (folder / "distca" / "__init__.py").open("a") as source:
        source.write("PATCHED = True\n")
    project = folder / "pyproject.toml"
    text, changed = re.subn(r'(?m)^version = ".*"$', 'version = "99.0.1"', project.read_text())
    assert changed == 1
    project.write_text(text)
    return folder


@pytest.fixture
def releases(
    docker: Docker, images: dict[str, str], base_image: str, patched: Path, registry: str
) -> Iterator[dict[str, tuple[Layers, Layers]]]:
    """Layers of each image, before the patch and after it."""
    found = {}
    for target in IMAGES:
        after = f"distca/{target}:patched"
        build(docker, patched, target, after, CPU_BASE_IMAGE=base_image)
        assert docker("run", "--rm", after, "--version").strip() == "distca 99.0.1"
        found[target] = (
            pushed(docker, registry, images[target], f"before/{target}"),
            pushed(docker, registry, after, f"after/{target}"),
        )
    yield found
    docker("rmi", *(f"distca/{target}:patched" for target in IMAGES))


def test_a_patch_release_is_a_small_pull_and_trainers_lie_on_the_layers_of_nodes(
    releases: dict[str, tuple[Layers, Layers]], capsys: pytest.CaptureFixture[str]
) -> None:
    pulled = {
        target: sum(size for digest, size in after.items() if digest not in before)
        for target, (before, after) in releases.items()
    }
    with capsys.disabled():
        for target, (_, after) in releases.items():
            print(f"\n{target}: {pulled[target]:,} of {sum(after.values()):,} bytes", end="")
    for target in IMAGES:
        # Something must have changed.
        assert 0 < pulled[target] < MAX_PULLED_BYTES, target
    node, trainer = (list(releases[target][1]) for target in ("attention-node", "trainer"))
    # All but the node's last, which is DistCA itself.
    assert trainer[: len(node) - 1] == node[:-1]
