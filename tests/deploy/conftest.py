"""An engine, images and stand-ins for all tests of the deployment that need Docker."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import ROOT
from tests.deploy import stand_ins
from tests.deploy.compose_project import ComposeProject
from tests.deploy.docker_engine import Docker, docker_engine
from tests.support.programs import ran
from tests.unit.deploy.test_compose_files import IMAGES

TAG = "test"
BUILD_SECONDS = 1200.0

VERIFIED_TRAINING = "--verify"
"""Options of `distca train`: each step is compared with local attention."""


@pytest.fixture(scope="session")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Docker]:
    """The engine that answers, or a private one."""
    with docker_engine(tmp_path_factory.mktemp("engine")) as engine:
        yield engine


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clean checkout of this state of the repository holds."""
    folder = tmp_path_factory.mktemp("checkout")
    listed = ran(
        "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():  # listed files may have been removed
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def given_base(
    variable: str, own: str, docker: Docker, tmp_path_factory: pytest.TempPathFactory
) -> str:
    given = os.environ.get(variable, "")
    if not given:
        stand_ins.make_stand_ins(docker, tmp_path_factory.mktemp("stand-ins"))
    return given or own


@pytest.fixture(scope="session")
def base_image(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On which images are built."""
    return given_base("DISTCA_TEST_BASE_IMAGE", stand_ins.BASE, docker, tmp_path_factory)


@pytest.fixture(scope="session")
def images(docker: Docker, checkout: Path, base_image: str) -> dict[str, str]:
    """The images of this checkout, built: full names by target."""
    stand_ins.fetch_torch(checkout / "docker" / "wheels", checkout / "docker" / "constraints.txt")
    names = {}
    for target in IMAGES:
        names[target] = f"distca/{target}:{TAG}"
        build(docker, checkout, target, names[target], CPU_BASE_IMAGE=base_image)
    return names


@pytest.fixture(scope="session")
def cuda_base_image(docker: Docker, tmp_path_factory: pytest.TempPathFactory) -> str:
    """On which images of GPUs are built: without Python, as NVIDIA's is."""
    return given_base("DISTCA_TEST_CUDA_BASE_IMAGE", stand_ins.BARE, docker, tmp_path_factory)


@pytest.fixture(scope="module")
def cuda_images(docker: Docker, checkout: Path, cuda_base_image: str) -> Iterator[dict[str, str]]:
    """The images of this checkout for GPUs: full names by target. A control plane has but one.

    They take 20 GB, so they go with the module that tests them.
    """
    names = {}
    for target in ("attention-node", "trainer"):
        names[target] = f"distca/{target}:{TAG}-cuda"
        arguments = {"VARIANT": "cuda", "CUDA_BASE_IMAGE": cuda_base_image}
        build(docker, checkout, target, names[target], **arguments)
    yield names
    docker("image", "rm", "--force", *names.values())
    if docker.is_private:
        docker("builder", "prune", "--force", "--filter=type=regular", timeout_seconds=300)


def build(docker: Docker, checkout: Path, target: str, name: str, **arguments: str) -> None:
    """Builds one target of docker/Dockerfile."""
    docker(
        "build",
        f"--file={checkout}/docker/Dockerfile",
        f"--target={target}",
        f"--tag={name}",
        *(f"--build-arg={key}={value}" for key, value in arguments.items()),
        str(checkout),
        timeout_seconds=BUILD_SECONDS,
    )


@pytest.fixture(scope="session")
def compose_environ(images: dict[str, str]) -> dict[str, str]:
    """Settings of docker/.env that this machine and these images need."""
    return {
        "DISTCA_TAG": TAG,
        "PROMETHEUS_IMAGE": os.environ.get("PROMETHEUS_IMAGE", stand_ins.PROMETHEUS),
    }


@pytest.fixture
def project(
    docker: Docker, checkout: Path, compose_environ: dict[str, str], request: pytest.FixtureRequest
) -> Iterator[ComposeProject]:
    """A project for one test, which trains 10 steps and verifies each."""
    environ = {**compose_environ, "DISTCA_STEPS": "10", "DISTCA_TRAIN_ARGS": VERIFIED_TRAINING}
    overrides = getattr(request, "param", ())
    with ComposeProject(docker, checkout, "distca-test", environ, overrides) as started:
        yield started
