"""`make push` brings images to a registry, from which what the chart asks for is pulled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.deploy.conftest import BUILD_SECONDS, TAG
from tests.deploy.docker_engine import Docker, DockerError
from tests.deploy.registry import registry_on_loopback

pytestmark = pytest.mark.timeout(2 * BUILD_SECONDS)

PUSH_SECONDS = 300.0


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """host:port of a registry of our own."""
    with registry_on_loopback(tmp_path) as address:
        yield address


def make(docker: Docker, *arguments: str) -> str:
    command = ["make", "--no-print-directory", *arguments]
    return docker.run(command, timeout_seconds=PUSH_SECONDS, cwd=ROOT)


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_what_was_pushed_is_pulled(
    docker: Docker, images: dict[str, str], registry: str, variant: str
) -> None:
    """One image under the names of all three: what is in them does not matter to a registry."""
    where = [f"IMAGE_TAG={TAG}-pushed", f"VARIANT={variant}"]
    names = make(docker, "image-names", *where).split()
    assert len(names) == 3
    for name in names:
        docker("tag", images["control-plane"], name)
    there = [f"{registry}/ml/{name}" for name in names]
    make(docker, "push", *where, f"REGISTRY={registry}/ml/")
    docker("rmi", *names, *there)
    for name in there:
        docker("pull", name, timeout_seconds=PUSH_SECONDS)
        assert docker("run", "--rm", name, "--version").startswith("distca ")
    docker("rmi", *there)


def test_an_image_that_was_not_built_and_no_registry_stop_it(docker: Docker, registry: str) -> None:
    with pytest.raises(DockerError):
        make(docker, "push", "IMAGE_TAG=nowhere", f"REGISTRY={registry}")
    with pytest.raises(DockerError):
        make(docker, "push", "REGISTRY=")
