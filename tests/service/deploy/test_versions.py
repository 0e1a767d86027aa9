"""One version for package, chart and images: what is installed asks for what is built."""

from __future__ import annotations

import tomllib

import pytest
import yaml

from tests import ROOT
from tests.support.programs import ran
from tests.unit.deploy.test_compose_files import IMAGES

VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def image_names(*arguments: str) -> list[str]:
    """What `make images` calls them, without settings of this shell's."""
    done = ran(
        "make",
        "--no-print-directory",
        "image-names",
        *arguments,
        env={"PATH": "/usr/bin:/bin"},
        check=True,
    )
    return done.stdout.split()


def compose_images(environment: str) -> set[str]:
    """Our images that Compose starts with the settings of a file; docker/.env has the defaults."""
    settings = {}
    for file in (".env", environment):
        for line in (ROOT / "docker" / file).read_text().splitlines():
            name, equals, value = line.partition("=")
            if equals and not name.startswith("#"):
                settings[name] = value
    services = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text())["services"]
    names = set()
    for service in services.values():
        name = service["image"]
        defaults = {"DISTCA_REGISTRY": "", "DISTCA_TAG": VERSION, "DISTCA_TAG_SUFFIX": ""}
        for variable, default in defaults.items():
            name = name.replace(f"${{{variable}:-{default}}}", settings[variable])
        names.add(name)
    return {name for name in names if name.startswith("distca/")}


def test_images_are_called_by_the_version() -> None:
    assert image_names() == [f"distca/{image}:{VERSION}" for image in IMAGES]


def test_images_of_gpus_have_names_of_their_own_and_a_control_plane_has_one() -> None:
    assert image_names("VARIANT=cuda") == [
        f"distca/control-plane:{VERSION}",
        f"distca/attention-node:{VERSION}-cuda",
        f"distca/trainer:{VERSION}-cuda",
    ]


@pytest.mark.parametrize(("environment", "variant"), [(".env", "cpu"), ("gpu.env", "cuda")])
def test_compose_starts_what_make_builds(environment: str, variant: str) -> None:
    assert compose_images(environment) == set(image_names(f"VARIANT={variant}"))
