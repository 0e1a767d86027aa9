"""The wheel holds what its code reads, and README's loop runs from it in an empty environment."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes
from pathlib import Path

import pytest

from core_attention.shape import AttentionShape
from tests import ROOT
from tests.cluster.end_to_end.test_readme import example
from tests.support.cluster import keep_profile
from tests.support.programs import ran
from tests.support.waiting import eventually
from tests.unit.distca.source_tree import PACKAGES

pytestmark = pytest.mark.timeout(300)

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=64, head_dim_v=64, dtype="float32")
START_SECONDS = 100.0
"""A control plane serves before its planner is compiled; importing takes long on busy cores."""
USER_CODE = """
from trainer_client import Session, SessionOptions

def fits(session: Session) -> str:
    return session.options_of_nobody

options: int = SessionOptions
"""


@pytest.fixture(scope="module")
def wheel() -> Path:
    """Of ``make wheel``."""
    (built,) = (ROOT / "build" / "wheel").glob("distca-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """The commands of an environment with the wheel alone, which sees what the wheel needs, and not
    the clone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder)
    pip = (sys.executable, "-m", "pip", "--python", folder / "bin" / "python")
    # The clone counts as installed where it is on the path.
    alone = ("--quiet", "--no-deps", "--no-index", "--ignore-installed")
    ran(*pip, "install", *alone, wheel, check=True)
    # Without its own .pth files: one of them names the clone.
    own = folder / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"
    (own / "beside.pth").write_text(site.getsitepackages()[0] + "\n")
    return folder / "bin"


@contextmanager
def control_plane(command: Path, folder: Path, environ: dict[str, str]) -> Iterator[str]:
    """The address of a control plane of the environment."""
    found = folder / "address.json"
    listen = ("--listen=127.0.0.1:0", "--metrics-listen=127.0.0.1:0", f"--address-file={found}")
    with subprocess.Popen([command, "control-plane", *listen], cwd=folder, env=environ) as process:
        try:
            eventually(found.exists, START_SECONDS)
            yield json.loads(found.read_text())["grpc"]
        finally:
            process.terminate()


def test_it_holds_each_package_with_its_types_and_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    listed = ran("git", "ls-files", "--", *sorted(PACKAGES), check=True).stdout.split()
    assert held == {name for name in listed if not name.endswith(".md")}
    assert {f"{package}/py.typed" for package in PACKAGES} <= held


def test_a_users_mypy_sees_the_types(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    (tmp_path / "user.py").write_text(USER_CODE)
    checked = ran(
        *(sys.executable, "-m", "mypy", "--cache-dir", str(tmp_path / "cache")),
        *("--python-executable", str(tmp_path / "venv/bin/python"), "user.py"),
        cwd=tmp_path,
    )
    assert '"Session" has no attribute "options_of_nobody"' in checked.stdout
    assert 'expression has type "type[SessionOptions]"' in checked.stdout
    assert "Found 2 errors" in checked.stdout, checked.stdout


def test_its_metadata_are_those_of_the_project(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as archive:
        (folder,) = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        metadata = message_from_bytes(archive.read(f"{folder}/METADATA"))
        entries = archive.read(f"{folder}/entry_points.txt").decode()
    assert metadata["Version"] == project["version"]
    assert metadata["Requires-Python"] == project["requires-python"]
    assert metadata["License-Expression"] == project["license"]
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert "[console_scripts]\ndistca = distca.__main__:main" in entries
    assert "[torch.backends]\ndistca = distca.autoload:watch_transformers" in entries


def test_readmes_loop_trains_from_it(tmp_path: Path, installed: Path) -> None:
    profiles = tmp_path / ".cache" / "distca"
    profiles.mkdir(parents=True)
    keep_profile(profiles, SHAPE)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    help_text = ran(installed / "distca", "--help", cwd=tmp_path, env=environ, check=True).stdout
    assert "control-plane" in help_text
    (tmp_path / "train.py").write_text(example() + "\nprint(distca.__file__)\n")
    with control_plane(installed / "distca", tmp_path, environ) as address:
        run = ran(
            installed / "python",
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py"),
            cwd=tmp_path,
            env=environ | {"DISTCA_CONTROL_PLANE": address, "DISTCA_PLACEMENT": "in-place"},
            timeout=200,
        )
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.count(" loss ") == 2 * 4
    assert str(installed.parent) in run.stdout
    assert str(ROOT / "distca") not in run.stdout
