"""Versions of training frameworks: named errors at import."""

from __future__ import annotations

import importlib
import importlib.metadata
from contextlib import nullcontext

import pytest

from trainer_client.frameworks import versions as frameworks
from trainer_client.frameworks.versions import UnsupportedSetting, require_version


def test_a_missing_framework_is_refused() -> None:
    with pytest.raises(UnsupportedSetting):
        require_version("no-such-framework", "0.3", "0.4", "megatron")


@pytest.mark.parametrize(
    ("found", "fits"),
    [
        *((found, True) for found in ("0.3", "0.3.0", "0.3.9", "0.3.0rc1")),
        *((found, False) for found in ("0.2.9", "0.4", "0.4.0", "1.0", "0.10.1")),
    ],
)
def test_versions_out_of_the_range_are_refused(
    found: str, *, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frameworks, "version", lambda name: found)
    with nullcontext() if fits else pytest.raises(UnsupportedSetting):
        require_version("torchtitan", "0.3", "0.4", "torchtitan")


@pytest.mark.parametrize("package", ["torchtitan", "megatron"])
def test_an_integration_without_its_framework_says_so(package: str) -> None:
    distribution = {"torchtitan": "torchtitan", "megatron": "megatron-core"}[package]
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        with pytest.raises(UnsupportedSetting):
            importlib.import_module(f"trainer_client.frameworks.{package}")
