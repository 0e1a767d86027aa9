"""`make push` brings images to a registry, from which what the chart asks for is pulled."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.conftest import BUILD_SECONDS, ROOT, TAG
from tests.deploy.docker_engine import Docker, DockerError

pytestmark = [pytest.mark.docker, pytest.mark.timeout(2 * BUILD_SECONDS)]

PUSH_SECONDS = 300.0
START_SECONDS = 20.0

CONFIGURATION = """
version: 0.1
storage: {{filesystem: {{rootdirectory: {folder}}}}}
http: {{addr: "127.0.0.1:0"}}
"""


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """host:port of a registry of our own, on loopback, where engines ask for no certificate."""
    program = shutil.which("docker-registry")
    if program is None:
        raise DockerError("there is no docker-registry (Debian: apt-get install docker-registry)")
    configuration, log = tmp_path / "registry.yml", tmp_path / "registry.log"
    configuration.write_text(CONFIGURATION.format(folder=tmp_path / "registry"))
    with log.open("w") as output:
        process = subprocess.Popen(
            [program, "serve", str(configuration)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        yield _address(process, log)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + START_SECONDS
    while not (found := re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text())):
        if process.poll() is not None or time.monotonic() > deadline:
            raise DockerError(f"docker-registry does not serve; its log:\n{log.read_text()}")
        time.sleep(0.1)
    return found[1]


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


def test_an_image_that_was_not_built_stops_it(docker: Docker, registry: str) -> None:
    with pytest.raises(DockerError, match="distca/control-plane:nowhere"):
        make(docker, "push", "IMAGE_TAG=nowhere", f"REGISTRY={registry}")


def test_without_a_registry_it_says_what_to_give(docker: Docker) -> None:
    with pytest.raises(DockerError, match=r"make push REGISTRY=registry\.example\.com"):
        make(docker, "push", "REGISTRY=")
