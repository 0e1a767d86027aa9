"""The frameworks are those of their wheels, file by file: nothing of them is edited."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["torchtitan", "megatron-core"])
def test_files_are_the_wheels(name: str) -> None:
    checked = 0
    for file in distribution(name).files or ():
        if file.hash is None:
            continue
        digest = hashlib.new(file.hash.mode, Path(file.locate()).read_bytes()).digest()
        assert base64.urlsafe_b64encode(digest).decode().rstrip("=") == file.hash.value, file
        checked += 1
    assert checked > 100


def test_nothing_else_imports_a_framework() -> None:
    code = (
        "import sys, distca.cli, trainer_client.models.transformers, attention_node.server\n"
        "assert not {'torchtitan', 'megatron'} & {name.partition('.')[0] for name in sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("package", ["torchtitan", "megatron"])
def test_importing_an_integration_replaces_nothing(package: str) -> None:
    """Its classes and functions stay those of its own files."""
    code = f"""
import importlib, inspect, sys
import trainer_client.frameworks.{package}
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] != "{package}":
        continue
    for member in vars(module).values():
        if inspect.isclass(member) and member.__module__ == name:
            for method in vars(member).values():
                if inspect.isfunction(method):
                    assert not method.__module__.startswith("trainer_client"), (member, method)
        assert not (
            inspect.isfunction(member) and member.__module__.startswith("trainer_client")
        ), (name, member)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
