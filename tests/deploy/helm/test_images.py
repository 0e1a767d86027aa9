"""The chart asks for the images that `make images` builds and `make push` brings to a registry."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests import ROOT
from tests.deploy.helm.chart import CHART, containers, helm, pod_specs, rendered
from tests.service.deploy.test_versions import VERSION, image_names

REGISTRY = "registry.example.com/ml"


def images(*settings: str) -> set[str]:
    """All images of a release."""
    specs = pod_specs(rendered("", *settings))
    return {each["image"] for _, spec in specs for each in containers(spec)}


@pytest.mark.parametrize(("variant", "settings"), [("cuda", ()), ("cpu", ("gpu.enabled=false",))])
@pytest.mark.parametrize("tag", ["", "nightly"])
def test_what_was_built_and_pushed_is_what_pods_pull(
    variant: str, settings: tuple[str, ...], tag: str
) -> None:
    built = image_names(f"VARIANT={variant}", *([f"IMAGE_TAG={tag}"] if tag else []))
    # Trainers are no part of the release.
    served = {name for name in built if "trainer" not in name}
    assert images(*settings, *([f"image.tag={tag}"] if tag else [])) == served
    pushed = {f"{REGISTRY}/{name}" for name in served}
    there = (f"image.registry={REGISTRY}", *([f"image.tag={tag}"] if tag else []))
    assert images(*settings, *there) == pushed


RELEASED = re.compile(r"oci://(ghcr\.io/OWNER)/charts/distca --version (\S+)")
"""The release workflow's registry, where the chart names it as its own."""


def commands_of_installing(document: Path) -> list[tuple[dict[str, str], str]]:
    """(variables of make by which the images are named, `helm install ...`) of each installation
    that ``document`` shows, from the folder of the chart."""
    text = re.sub(r"\s*\\\n\s*", " ", document.read_text())
    shown, named = [], ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith(("make push", "kind load")):
            named = line
        elif released := RELEASED.search(line):
            assert released[2] == VERSION
            # Pushed under small letters, whoever owns it.
            registry = released[1].lower()
            install = RELEASED.sub(f"helm/distca --set image.registry={registry}", line)
            variant = "cpu" if "cpu-values" in line else "cuda"
            shown.append(({"REGISTRY": registry, "VARIANT": variant}, install))
        elif line.startswith("helm install distca "):
            shown.append((dict(re.findall(r"(\w+)=(\S+)", named)), line))
    return shown


@pytest.mark.parametrize(
    ("document", "n_shown"),
    [("README.md", 1), ("helm/distca/README.md", 1), ("docs/deploy_kubernetes.md", 4)],
)
def test_what_the_documents_install_was_pushed(document: str, n_shown: int) -> None:
    shown = commands_of_installing(ROOT / document)
    assert len(shown) == n_shown
    for settings, install in shown:
        registry = settings.pop("REGISTRY", "")
        built = image_names(*(f"{name}={value}" for name, value in settings.items()))
        there = {f"{registry}/{name}" if registry else name for name in built}
        done = helm("template", *shlex.split(install)[2:3], str(CHART), *shlex.split(install)[4:])
        assert done.returncode == 0, done.stderr
        manifests = [each for each in yaml.safe_load_all(done.stdout) if each]
        pulled = {each["image"] for _, spec in pod_specs(manifests) for each in containers(spec)}
        assert len(pulled) == 2, "control plane and node"
        assert pulled < there
