"""The Compose files agree with each other, with docker/.env and with the images."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import ROOT

DOCKER = ROOT / "docker"
COMPOSE_FILES = sorted(DOCKER.glob("compose*.yaml"))
IMAGES = ("control-plane", "attention-node", "trainer")
OURS = ("control-plane", "attention-node", "trainer-0", "trainer-1")


def variables(path: Path) -> set[tuple[str, str]]:
    """Names and defaults of the variables in a Compose file."""
    return set(re.findall(r"(?<!\$)\$\{(\w+):-([^}]*)\}", path.read_text()))


def settings(file: str) -> dict[str, str]:
    """What an environment file sets."""
    lines = (DOCKER / file).read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def services(file: str = "compose.yaml") -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((DOCKER / file).read_text())["services"])


def test_environment_file_lists_every_setting_with_its_default() -> None:
    used = set().union(*map(variables, COMPOSE_FILES))
    given = {key: value for key, value in settings(".env").items() if key.startswith("COMPOSE_")}
    assert used == settings(".env").items() - given.items()


def test_gpu_settings_are_settings() -> None:
    assert settings("gpu.env").keys() <= settings(".env").keys()


@pytest.mark.parametrize("service", OURS)
def test_our_services_have_no_rights_to_spare(service: str) -> None:
    described = services()[service]
    assert described["read_only"] is True
    assert described["cap_drop"] == ["ALL"]
    assert described["security_opt"] == ["no-new-privileges:true"]
    assert described["shm_size"]
    assert described["mem_limit"]


def test_ports_are_published_on_loopback_only() -> None:
    published = [port for each in services().values() for port in each.get("ports", ())]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_images_of_others_are_pinned() -> None:
    others = services("compose.gpu.yaml") | services()
    for service in ("prometheus", "grafana", "dcgm-exporter"):
        assert re.search(r":-[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*\}$", others[service]["image"])
    recipe = (DOCKER / "Dockerfile").read_text()
    assert re.search(r"^ARG CPU_BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", recipe, re.MULTILINE)
    assert re.search(r"^ARG CUDA_BASE_IMAGE=\S+:\d+\.\d+\.\d+-\S+$", recipe, re.MULTILINE)


def test_every_image_is_built_by_one_service() -> None:
    built = [each["build"]["target"] for each in services().values() if "build" in each]
    assert sorted(built) == sorted(IMAGES)


def test_the_control_plane_keeps_the_secret_of_jobs_in_a_volume() -> None:
    described = services()["control-plane"]
    folder = described["environment"]["DISTCA_STATE_DIR"]
    assert f"control-plane-state:{folder}" in described["volumes"]
