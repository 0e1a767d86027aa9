"""One run of docker/compose.yaml, as a user starts it."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from tests.deploy.docker_engine import Docker, DockerError

SERVICES = ("control-plane", "attention-node", "trainer-0", "trainer-1", "prometheus")
"""All but Grafana, whose image cannot be had everywhere."""

START_SECONDS = 300.0
TRAINING_SECONDS = 900.0
"""For hangs only: it takes about a minute on an idle machine."""

T = TypeVar("T")


class ComposeProject:
    """A project with a name, ports and volumes of its own; a context manager that removes it.

    Args:
        docker: the engine that has the images.
        checkout: the repository.
        name: of the project.
        environ: settings that differ from docker/.env.
        overrides: more Compose files of docker/, by name.
    """

    def __init__(
        self,
        docker: Docker,
        checkout: Path,
        name: str,
        environ: Mapping[str, str],
        overrides: Sequence[str] = (),
    ) -> None:
        self.docker = docker
        self.prometheus = f"http://127.0.0.1:{(port := free_port())}"
        self._environ = {
            "COMPOSE_PROJECT_NAME": name,
            "PROMETHEUS_PORT": str(port),
            "DISTCA_CONTROL_PLANE_PORT": str(free_port()),
            **environ,
        }
        files = [f"--file=docker/{file}" for file in ("compose.yaml", *overrides)]
        self._command = [*docker.compose(), *files]
        self._checkout = checkout

    def __enter__(self) -> ComposeProject:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with suppress(DockerError):
            self("down", "--volumes", "--timeout=5")

    def __call__(self, *arguments: str, timeout_seconds: float = START_SECONDS) -> str:
        """What Docker Compose prints."""
        return self.docker.run(
            [*self._command, *arguments],
            timeout_seconds=timeout_seconds,
            cwd=self._checkout,
            environ=self._environ,
        )

    def up(self, *, nodes: int, services: Sequence[str] = SERVICES) -> None:
        """Starts ``services`` from images that are there, in the order of their dependencies."""
        self("up", "--detach", "--no-build", f"--scale=attention-node={nodes}", *services)

    def containers(self, service: str) -> list[str]:
        """Ids of the service's containers, those that have ended included."""
        label = f"--filter=label=com.docker.compose.service={service}"
        project = self._environ["COMPOSE_PROJECT_NAME"]
        mine = f"--filter=label=com.docker.compose.project={project}"
        return self.docker("ps", "--all", "--quiet", "--no-trunc", mine, label).split()

    def container(self, service: str) -> str:
        """The id of the service's only container."""
        (only,) = self.containers(service)
        return only

    def logs(self, container: str) -> str:
        """All that it has printed, to stdout and to stderr."""
        return self.docker.run(
            ["sh", "-c", f"{self.docker.environ.get('DOCKER', 'docker')} logs {container} 2>&1"],
            timeout_seconds=60,
        )

    def steps_done(self) -> int:
        """Training steps that trainer 0 has shown as done."""
        shown = re.findall(r"step (\d+)/\d+ loss", self.logs(self.container("trainer-0")))
        return int(shown[-1]) if shown else 0

    def wait_for_step(self, step: int) -> None:
        """Waits until ``step`` steps are done; the trainers must not end before."""

        def reached() -> bool:
            if self.steps_done() >= step:
                return True
            if not self._running(self.container("trainer-0")):
                raise AssertionError(f"trainer 0 has ended:\n{self.tails()}")
            return False

        wait_until(reached, TRAINING_SECONDS, f"step {step}", self.tails)

    def wait_for_trainers(self) -> list[int]:
        """Waits until both trainers have ended; their exit codes in order of ranks."""
        trainers = [self.container(f"trainer-{rank}") for rank in (0, 1)]
        wait_until(
            lambda: not any(self._running(each) for each in trainers),
            TRAINING_SECONDS,
            "the end of training",
            self.tails,
        )
        return [self.exit_code(each) for each in trainers]

    def exit_code(self, container: str) -> int:
        """Of a container that has ended."""
        return int(self.docker.inspect(container)["State"]["ExitCode"])

    def run_record(self) -> dict[str, Any]:
        """What the finished run has left."""
        trainer = self.container("trainer-0")
        archive = self.docker("cp", f"{trainer}:/runs/demo/run.json", "-")
        # A tar archive of one file: its text begins where the first brace is.
        found: dict[str, Any] = json.loads(archive[archive.index("{") : archive.rindex("}") + 1])
        return found

    def tails(self) -> str:
        """The last lines of every container's log, for messages of failures."""
        said = []
        for service in SERVICES:
            for container in self.containers(service):
                state = self.docker.inspect(container)["State"]
                said.append(f"-- {service} {container[:12]} {state['Status']} {state['ExitCode']}")
                said.append(self.logs(container)[-2500:])
        return "\n".join(said)

    def _running(self, container: str) -> bool:
        return bool(self.docker.inspect(container)["State"]["Running"])


def wait_until(
    condition: Callable[[], T],
    seconds: float,
    what: str,
    explain: Callable[[], str] = lambda: "",
) -> T:
    """What ``condition`` returns once that is true.

    Raises:
        AssertionError: it is not within ``seconds``; with the text of ``explain``.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {seconds:g} s\n{explain()}")
        time.sleep(1.0)
    return found


def free_port() -> int:
    """A TCP port of loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
