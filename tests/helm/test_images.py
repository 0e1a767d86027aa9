"""The chart asks for the images that `make images` builds and `make push` brings to a registry."""

from __future__ import annotations

import pytest

from tests.deploy.test_versions import image_names
from tests.helm.chart import containers, pod_specs, rendered

REGISTRY = "registry.example.com/ml"
WITH_JOB = "exampleJob.enabled=true"


def images(*settings: str) -> set[str]:
    """All images of a release with an example job."""
    specs = pod_specs(rendered("", WITH_JOB, *settings))
    return {each["image"] for _, spec in specs for each in containers(spec)}


@pytest.mark.parametrize(
    ("variant", "settings"),
    [("cuda", ("exampleJob.gpus=1",)), ("cpu", ("gpu.enabled=false",))],
)
@pytest.mark.parametrize("tag", ["", "nightly"])
def test_what_was_built_and_pushed_is_what_pods_pull(
    variant: str, settings: tuple[str, ...], tag: str
) -> None:
    built = image_names(f"VARIANT={variant}", *([f"IMAGE_TAG={tag}"] if tag else []))
    assert images(*settings, *([f"image.tag={tag}"] if tag else [])) == set(built)
    pushed = {f"{REGISTRY}/{name}" for name in built}
    there = (f"image.registry={REGISTRY}", *([f"image.tag={tag}"] if tag else []))
    assert images(*settings, *there) == pushed


def test_a_job_without_gpus_takes_the_image_without_cuda() -> None:
    trainers = {name for name in images() if "/trainer:" in name}
    assert trainers == {name for name in image_names() if "/trainer:" in name}
    nodes = {name for name in images() if "/attention-node:" in name}
    assert all(name.endswith("-cuda") for name in nodes)


def test_a_tag_of_its_own_stands_as_it_is() -> None:
    assert "distca/attention-node:mine" in images("attentionNode.image.tag=mine")
