"""The frameworks stay as they are: an integration replaces nothing of them."""

from __future__ import annotations

import subprocess
import sys

import pytest


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
