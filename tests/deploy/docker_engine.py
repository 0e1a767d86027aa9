"""A Docker engine for the tests: the one that runs, or a private one that ends with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
STOP_SECONDS = 60.0


class DockerError(Exception):
    """A command failed; the message holds the end of what it said."""


class Docker:
    """The command-line client of one engine.

    Args:
        environ: of every command; ``DOCKER_HOST`` in it chooses the engine.
        is_private: whether nobody else uses the engine, so that its caches may be cleared.
    """

    def __init__(self, environ: Mapping[str, str], *, is_private: bool = False) -> None:
        self.is_private = is_private
        self.environ = {**environ, "DOCKER_BUILDKIT": "1"}
        self._program = environ.get("DOCKER", "docker")

    def __call__(self, *arguments: str, timeout_seconds: float = 120.0) -> str:
        """What the command prints, without the last newline.

        Raises:
            DockerError: it failed or took too long.
        """
        return self.run([self._program, *arguments], timeout_seconds=timeout_seconds)

    def run(
        self,
        command: list[str],
        *,
        timeout_seconds: float,
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> str:
        """The same for any command that talks to the engine, such as docker-compose."""
        try:
            done = subprocess.run(
                command,
                cwd=cwd,
                env={**self.environ, **(environ or {})},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DockerError(f"{command} took more than {timeout_seconds:g} s") from error
        if done.returncode:
            raise DockerError(
                f"{command} exited with {done.returncode}:\n{done.stdout[-4000:]}\n"
                f"{done.stderr[-4000:]}"
            )
        return done.stdout.rstrip("\n")

    def inspect(self, name: str) -> dict[str, Any]:
        """All that the engine knows of a container or image."""
        (found,) = json.loads(self("inspect", name))
        return dict(found)

    def shell(self, image: str, script: str, *options: str) -> str:
        """What ``script`` prints in a new container of ``image``."""
        return self("run", "--rm", "--entrypoint=sh", *options, image, "-c", script)

    def compose(self) -> list[str]:
        """The command of Docker Compose: version 2 if it is there, else version 1.

        Raises:
            DockerError: there is neither.
        """
        try:
            self("compose", "version")
        except DockerError:
            if shutil.which("docker-compose") is None:
                raise
            return ["docker-compose"]
        return [self._program, "compose"]


@contextmanager
def docker_engine(folder: Path) -> Iterator[Docker]:
    """The engine that ``docker`` reaches; if there is none, one that runs in ``folder`` meanwhile.

    Args:
        folder: of a private engine, within pytest's folder of this run.

    Raises:
        DockerError: there is none, and none can be started.
    """
    docker = Docker(os.environ)
    try:
        docker("info")
    except (DockerError, FileNotFoundError) as error:
        dockerd = shutil.which("dockerd")
        if dockerd is None or os.geteuid() != 0:
            raise DockerError(
                f"no Docker engine answers ({error}) and none can be started here, which takes "
                "root and dockerd (Debian: apt-get install docker.io)"
            ) from error
    else:
        yield docker
        return
    _remove_what_killed_runs_left(folder)
    with _private_engine(dockerd, folder) as docker:
        yield docker


def _remove_what_killed_runs_left(folder: Path) -> None:
    """Images of private engines that were killed with their tests: they could fill the disk."""
    for data in folder.parent.parent.glob("pytest-*/engine*/data"):
        if not _serves(data.with_name("dockerd.pid")):
            shutil.rmtree(data, ignore_errors=True)


def _serves(pidfile: Path) -> bool:
    """Whether the dockerd that wrote the file still runs."""
    try:
        command = Path("/proc", pidfile.read_text().strip(), "cmdline").read_bytes()
    except FileNotFoundError:
        return False
    return f"--pidfile={pidfile}".encode() in command.split(b"\0")


@contextmanager
def _private_engine(dockerd: str, folder: Path) -> Iterator[Docker]:
    """An engine with folder, socket and log of its own."""
    socket = f"unix://{folder}/docker.sock"
    log = folder / "dockerd.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [
                dockerd,
                f"--host={socket}",
                f"--data-root={folder}/data",
                f"--exec-root={folder}/exec",
                f"--pidfile={folder}/dockerd.pid",
            ],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    try:
        docker = Docker({**os.environ, "DOCKER_HOST": socket}, is_private=True)
        _wait_until_it_answers(docker, process, log)
        yield docker
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # Tens of gigabytes, which pytest would keep for three more runs.
        shutil.rmtree(folder / "data", ignore_errors=True)


def _wait_until_it_answers(docker: Docker, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            docker("info")
        except DockerError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise DockerError(
                    f"dockerd does not serve; the end of its log:\n{log.read_text()[-3000:]}"
                ) from error
            time.sleep(0.5)
        else:
            return
