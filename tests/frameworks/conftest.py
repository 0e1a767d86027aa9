"""These tests run by themselves (``make test-frameworks``), where torchtitan and Megatron-core are
installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

# Their modules import the frameworks.
collect_ignore_glob = [] if find_spec("torchtitan") else ["test_in_process_*.py"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if "frameworks" not in config.option.markexpr:
        unwanted = [item for item in items if item.get_closest_marker("frameworks")]
        items[:] = [item for item in items if item not in unwanted]
        config.hook.pytest_deselected(items=unwanted)
