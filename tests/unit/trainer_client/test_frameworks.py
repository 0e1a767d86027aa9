"""Versions of training frameworks: named errors at import."""

from __future__ import annotations

import importlib
import importlib.metadata

import pytest

from trainer_client.frameworks import versions as frameworks
from trainer_client.frameworks.versions import (
    UnsupportedSetting,
    refuse,
    require_version,
)


def test_a_missing_framework_says_what_to_install() -> None:
    with pytest.raises(UnsupportedSetting):
        require_version("no-such-framework", "0.3", "0.4", "megatron")


@pytest.mark.parametrize("found", ["0.3", "0.3.0", "0.3.9", "0.3.0rc1"])
def test_versions_in_the_range_pass(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "version", lambda name: found)
    require_version("torchtitan", "0.3", "0.4", "torchtitan")


@pytest.mark.parametrize("found", ["0.2.9", "0.4", "0.4.0", "1.0", "0.10.1"])
def test_versions_out_of_the_range_are_named(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks, "version", lambda name: found)
    with pytest.raises(UnsupportedSetting):
        require_version("torchtitan", "0.3", "0.4", "torchtitan")


def test_all_problems_are_named_together() -> None:
    refuse([], "torchtitan")
    with pytest.raises(UnsupportedSetting):
        refuse(["one", "two"], "torchtitan")


@pytest.mark.parametrize("package", ["torchtitan", "megatron"])
def test_an_integration_without_its_framework_says_so(package: str) -> None:
    distribution = {"torchtitan": "torchtitan", "megatron": "megatron-core"}[package]
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(UnsupportedSetting):
            importlib.import_module(f"trainer_client.frameworks.{package}")
