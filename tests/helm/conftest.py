"""All tests here need the chart's tools; without them they are skipped, and told how to be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helm.chart import tools_are_there

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = not tools_are_there()
    for item in items:
        if _FOLDER in item.path.parents:
            item.add_marker(pytest.mark.helm)
            if missing:
                item.add_marker(
                    pytest.mark.skip(reason="needs python tools/fetch_chart_tools.py (make chart)")
                )
