"""What the images' recipe runs of ours exists, while it builds and in health checks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing

import pytest
from prometheus_client import CollectorRegistry

from distca.process.monitoring import Health, MetricsEndpoint
from tests import ROOT
from tests.support.programs import ran

PROGRAMS = re.findall(
    r'^(?:RUN| *) /opt/distca/bin/python -c "([^"]+)"',
    (ROOT / "docker" / "Dockerfile").read_text(),
    re.M,
)


def test_the_recipe_runs_programs_of_ours() -> None:
    assert PROGRAMS


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_the_recipe_runs(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=100, check=True)


class Process:
    """One with a metrics port, as a container has it."""

    def __init__(self) -> None:
        self.serves = False
        health = Health(serves=lambda: self.serves)
        self.endpoint = MetricsEndpoint("127.0.0.1", 0, CollectorRegistry(), health=health)

    def is_ready(self) -> tuple[bool, str]:
        """What the health check of its image finds, and says."""
        done = ran(
            ROOT / "docker" / "ready.sh",
            str(self.endpoint.port),
            env={"PATH": "/usr/bin:/bin", "HOSTNAME": "127.0.0.1"},
            timeout=20,
        )
        return done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def process() -> Iterator[Process]:
    made = Process()
    with closing(made.endpoint):
        yield made


def test_the_health_check_asks_whether_the_process_serves(process: Process) -> None:
    assert process.is_ready() == (False, "HTTP/1.0 503 Service Unavailable\n")
    process.serves = True
    assert process.is_ready() == (True, "HTTP/1.0 200 OK\n")
    process.endpoint.close()
    ready, said = process.is_ready()
    assert not ready
    assert "refused" in said


def test_images_ask_at_the_metrics_ports_that_they_expose() -> None:
    recipe = (ROOT / "docker" / "Dockerfile").read_text()
    asked = re.findall(r'CMD \["distca-ready", "(\d+)"\]', recipe)
    assert asked == ["7701", "7712"]
    assert "EXPOSE 7700 7701\n" in recipe
    assert "EXPOSE 7710 7712\n" in recipe
    assert "--metrics-port=7712" in recipe
