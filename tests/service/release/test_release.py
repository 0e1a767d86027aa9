"""What keeps a release from being made with versions that differ, and what is known of a push."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.programs import ran
from tools import release
from tools.release import ReleaseError, check_versions, references, versions

VERSION = versions(ROOT)["pyproject.toml"]
FILES = ("pyproject.toml", "helm/distca/Chart.yaml", "docker/.env", "CHANGELOG.md")
DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A copy of the files in which a version stands."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def replace(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_code_chart_and_images_have_one_version() -> None:
    assert set(versions(ROOT).values()) == {VERSION}


def test_the_tag_of_this_version_is_released_once_the_changelog_has_its_date(root: Path) -> None:
    changelog = root / "CHANGELOG.md"
    changelog.write_text(f"## [Unreleased]\n\n## [{VERSION}] - 2026-11-30\n")
    check_versions(root, f"v{VERSION}")
    changelog.write_text(f"## [Unreleased]\n\n## [{VERSION}]\n")
    with pytest.raises(ReleaseError):
        check_versions(root, f"v{VERSION}")


@pytest.mark.parametrize(
    ("name", "before", "after", "place"),
    [
        ("pyproject.toml", f'version = "{VERSION}"', 'version = "9.9.8"', "pyproject.toml"),
        ("helm/distca/Chart.yaml", f"\nversion: {VERSION}", "\nversion: 9.9.8", "version of"),
        ("helm/distca/Chart.yaml", f'appVersion: "{VERSION}"', 'appVersion: "9.9.8"', "appVersion"),
        ("docker/.env", f"DISTCA_TAG={VERSION}", "DISTCA_TAG=9.9.8", "DISTCA_TAG"),
    ],
)
def test_a_place_that_differs_is_named(
    root: Path, name: str, before: str, after: str, place: str
) -> None:
    replace(root / name, before, after)
    with pytest.raises(ReleaseError):
        check_versions(root, f"v{VERSION}")
    (differing,) = (name for name, version in versions(root).items() if version != VERSION)
    assert place in differing


@pytest.mark.parametrize("tag", ["", VERSION, f"v{VERSION}-rc1", "v1", "v1.2.3\nv1.2.3"])
def test_a_tag_of_another_form_is_refused(root: Path, tag: str) -> None:
    with pytest.raises(ReleaseError):
        check_versions(root, tag)


def test_make_release_check_fails_and_says_why() -> None:
    done = ran("make", "--no-print-directory", "release-check", "TAG=v9.9.9")
    assert done.returncode != 0
    assert f"pyproject.toml says {VERSION}" in done.stderr


def test_what_was_pushed_is_named_by_its_digest(tmp_path: Path) -> None:
    for index, name in enumerate(
        ("localhost:5000/ml/distca/trainer:1.2.3,localhost:5000/ml/distca/trainer:latest", "r/a/b")
    ):
        metadata = {"image.name": name, "containerimage.digest": DIGEST, "more": {}}
        (tmp_path / f"image-{index}.json").write_text(json.dumps(metadata))
    names = references(tmp_path)
    assert names == [f"localhost:5000/ml/distca/trainer@{DIGEST}", f"r/a/b@{DIGEST}"]


def test_without_a_push_there_is_nothing_to_sign(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError):
        references(tmp_path)
    (tmp_path / "image-a.json").write_text('{"buildx.build.ref": "x"}')
    with pytest.raises(ReleaseError):
        references(tmp_path)


def test_a_helm_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError):
        release.push_chart("r/a", helm="/no/helm", options=[], folder=tmp_path)
