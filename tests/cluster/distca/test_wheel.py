"""The wheel: its import names, and the types that a user's mypy sees."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.programs import ran
from tests.unit.distca.source_tree import PACKAGES, copy_sources

USER_CODE = """
from trainer_client import Session, SessionOptions

def fits(session: Session) -> str:
    return session.options_of_nobody

options: int = SessionOptions
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    copy_sources(folder)
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder)),
        ],
        check=True,
        timeout=100,
    )
    (wheel,) = (folder / "dist").glob("distca-*.whl")
    return wheel


def test_it_brings_no_other_import_names(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        names = {Path(name).parts[0] for name in archive.namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == set(PACKAGES)


def test_a_users_mypy_sees_the_types(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    (site_packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with ZipFile(wheel) as archive:
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
