"""What is in the images, and what is not."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.deploy import stand_ins
from tests.deploy.compose_project import wait_until
from tests.deploy.conftest import BUILD_SECONDS, build
from tests.deploy.docker_engine import Docker, DockerError
from tests.unit.deploy.test_compose_files import IMAGES

pytestmark = pytest.mark.timeout(4 * BUILD_SECONDS)

USER_ID = "10001"
SBOM = "/opt/distca/share/doc/distca/sbom.cdx.json"
START_SECONDS = 20.0
"""For a control plane whose planner is compiled; compiling alone takes 30 s of a quiet core."""

MAX_MEBIBYTES_OVER_BASE = {"control-plane": 440, "attention-node": 1700, "trainer": 2200}
"""A fifth more than measured: something large that comes in unseen is noticed."""

pytest_each_image = pytest.mark.parametrize("target", IMAGES)


@pytest_each_image
def test_image_runs_without_rights(docker: Docker, images: dict[str, str], target: str) -> None:
    assert docker.inspect(images[target])["Config"]["User"] == "10001:10001"
    assert docker.shell(images[target], "id -u; id -g").split() == [USER_ID, USER_ID]
    writable = docker.shell(
        images[target], "find /opt/distca /usr /etc -writable -not -type l 2>/dev/null; true"
    )
    assert writable == ""


@pytest_each_image
def test_nothing_that_builds_is_left(docker: Docker, images: dict[str, str], target: str) -> None:
    tools = "gcc g++ cc c++ clang make cmake ld nvcc git"
    assert docker.shell(images[target], f"which {tools}; true") == ""
    assert docker.shell(images[target], "ls /opt/distca/bin | grep -w pip; true") == ""
    assert docker.shell(images[target], "ls -A /root /build /wheels /dist 2>/dev/null; true") in (
        "",
        "/root:\n.bashrc\n.profile",
    )


@pytest_each_image
def test_image_says_what_it_is(docker: Docker, images: dict[str, str], target: str) -> None:
    config = docker.inspect(images[target])["Config"]
    labels = config["Labels"]
    assert labels["org.opencontainers.image.title"] == f"DistCA {target.replace('-', ' ')}"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["StopSignal"] == "SIGTERM"
    assert config["Entrypoint"] == ["distca"], "exec form: process 1 gets the signal itself"
    secrets = [each for each in config["Env"] if any(w in each for w in ("TOKEN", "SECRET", "KEY"))]
    assert secrets == []


@pytest_each_image
def test_bill_of_materials_lists_what_is_installed(
    docker: Docker, images: dict[str, str], target: str
) -> None:
    bill = json.loads(docker.shell(images[target], f"cat {SBOM}"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {
        (component["name"].lower().replace("_", "-"), component["version"])
        for component in bill["components"]
    }
    names = "distribution.metadata['Name'], distribution.version"
    program = (
        f"import importlib.metadata as m\nfor distribution in m.distributions(): print({names})"
    )
    installed = {
        (name.lower().replace("_", "-"), version)
        for name, version in (
            line.split()
            for line in docker(
                "run", "--rm", "--entrypoint=python", images[target], "-c", program
            ).splitlines()
        )
    }
    assert ("distca", "0.1.0") in installed
    assert listed == installed


def test_control_plane_has_neither_torch_nor_cuda(docker: Docker, images: dict[str, str]) -> None:
    packages = docker.shell(images["control-plane"], "ls /opt/distca/lib/python3*/site-packages")
    for unwanted in ("torch", "transformers", "cuda", "nvidia", "libucx", "ucxx"):
        assert unwanted not in packages.split()


@pytest_each_image
def test_image_is_not_larger_than_it_has_to_be(
    docker: Docker, images: dict[str, str], base_image: str, target: str
) -> None:
    over_base = docker.inspect(images[target])["Size"] - docker.inspect(base_image)["Size"]
    mebibytes = over_base / 2**20
    assert mebibytes < MAX_MEBIBYTES_OVER_BASE[target]
    assert mebibytes > MAX_MEBIBYTES_OVER_BASE[target] / 2, "tighten the limit"


def test_control_plane_starts_in_seconds_from_a_loaded_read_only_image(
    docker: Docker, images: dict[str, str], tmp_path: Path
) -> None:
    """Saving and loading rounds the files' times to seconds, as a registry does: the planner's
    machine code must still count as that of its sources."""
    archive = tmp_path / "image.tar"
    docker("save", f"--output={archive}", images["control-plane"], timeout_seconds=300)
    docker("rmi", "--force", images["control-plane"])
    docker("load", f"--input={archive}", timeout_seconds=300)
    archive.unlink()
    container = docker("run", "--detach", "--read-only", "--tmpfs=/tmp", images["control-plane"])
    try:
        begun = time.monotonic()

        def serves() -> bool:
            try:
                return "SERVING" in docker("exec", container, "distca", "health")
            except DockerError:
                return False

        wait_until(serves, START_SECONDS, "health", lambda: docker("logs", container))
        assert time.monotonic() - begun < START_SECONDS
        docker("stop", "--time=15", container)
        assert docker.inspect(container)["State"]["ExitCode"] == 0
    finally:
        docker("rm", "--force", container)


def test_process_1_ends_on_sigterm_while_it_starts(docker: Docker, images: dict[str, str]) -> None:
    """The kernel ignores SIGTERM for a first process without a handler of its own."""
    container = docker(
        "run",
        "--detach",
        images["attention-node"],
        "attention-node",
        "--control-plane=nobody.invalid:7700",
        "--shape=32:8:128:bfloat16",
    )
    try:
        time.sleep(3.0)  # it imports, or measures its kernels, which takes longer
        begun = time.monotonic()
        docker("stop", "--time=30", container)
        assert time.monotonic() - begun < 25, "killed after the time it was given"
        assert docker.inspect(container)["State"]["ExitCode"] in (0, 1, 143)
    finally:
        docker("rm", "--force", container)


def test_a_base_without_python_gets_one(docker: Docker, checkout: Path, images: object) -> None:
    """As the CUDA base is; the images of GPUs differ in it and in PyTorch alone."""
    build(
        docker,
        checkout,
        "build",
        "distca-test/build-cuda",
        VARIANT="cuda",
        CUDA_BASE_IMAGE=stand_ins.BARE,
    )
    python = docker.shell("distca-test/build-cuda", "/opt/distca/bin/python --version")
    assert python.startswith("Python 3.")
